"""Blocks of any depth that hold a given number of parameters."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ffnlab import build
from ffnlab.config import settings
from ffnlab.nn.count import Cost, count, total
from ffnlab.nn.gpt import ModelSettings

TOLERANCE = 0.01
Config = Mapping[str, Any]


def at_depth(cfg: Config, depth: int, parameters: int) -> Config | None:
    """`cfg` with `depth` layers whose blocks hold `parameters` within 1 %; None where that cannot be."""
    model, each = cfg["model"], parameters / depth
    density = size(cfg).active_parameters / (model["n_layers"] * model["d_model"] ** 2)
    d_model = max(8, 8 * round(math.sqrt(each / density) / 8))
    d_head, kv = model["d_model"] / model["n_heads"], cfg["attention"].get("n_kv_heads") or 1
    heads = [h for h in range(1, d_model // 2 + 1) if d_model % (2 * h) == 0 and h % kv == 0]
    if not heads:
        return None
    plain = {"drop_attn": [], "drop_ffn": [], "value_embeddings": [], "n_layers": depth, "d_model": d_model}
    plain["n_heads"] = min(heads, key=lambda h: abs(math.log(d_model / h / d_head)))
    ffn = {"expansion_by_layer": None, "d_ff": None, "match": "params", "expansion": 4.0}
    shape = {**cfg, "model": {**model, **plain}, "ffn": {**cfg["ffn"], **ffn}}
    # The parameters of the plain MLP, to which all variants are matched, grow by 2 d_model^2 with expansion.
    missing = each - size(shape).active_parameters / depth
    shape["ffn"]["expansion"] = ffn["expansion"] + missing / (2 * d_model**2)
    if shape["ffn"]["expansion"] <= 0:
        return None
    return shape if abs(size(shape).active_parameters / parameters - 1) <= TOLERANCE else None


def size(cfg: Config) -> Cost:
    """What the blocks of a configuration cost; nothing is allocated."""
    with torch.device("meta"):
        return cost(blocks(cfg), cfg["model"]["seq_len"])


def blocks(cfg: Config) -> nn.ModuleDict:
    """All blocks, under the name that they have in the model."""
    sizes = settings(ModelSettings, cfg["model"], "model")
    return nn.ModuleDict({"blocks": nn.ModuleList(build.blocks(cfg, sizes))})


def cost(module: nn.Module, seq_len: int) -> Cost:
    return total(count(module, seq_len).values())
