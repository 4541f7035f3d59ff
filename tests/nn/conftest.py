"""Parts built from their yaml alone, so that a new variant is tested the day its file is written."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from ffnlab.config import locate
from ffnlab.nn.ffn.base import FFN

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CONTEXT = 8  # of parts that ask for it


def part(group: str, name: str) -> tuple[type, dict[str, Any]]:
    """The class and the options of configs/<group>/<name>.yaml for its constructor."""
    node = OmegaConf.to_container(OmegaConf.load(CONFIGS / group / f"{name}.yaml"))
    cls = locate(node["_target_"])
    return cls, {key: node[key] for key in inspect.signature(cls).parameters if key in node} | context(cls)


def context(cls: type) -> dict[str, int]:
    """The context that build gives to the few parts that ask for it."""
    return {"seq_len": CONTEXT} if "seq_len" in inspect.signature(cls).parameters else {}


@pytest.fixture
def make_act() -> Callable[..., nn.Module]:
    """make_act(name, d_ff) -> the activation of configs/act/<name>.yaml."""

    def make(name: str, d_ff: int) -> nn.Module:
        cls, options = part("act", name)
        return cls(d_ff=d_ff, **options)

    return make


@pytest.fixture
def make_ffn(make_act) -> Callable[..., FFN]:
    """make_ffn(name, act, d_model, d_ff) -> the FFN of configs/ffn/<name>.yaml, drawn from seed 0."""

    def make(
        name: str,
        act: str = "relu2",
        d_model: int = 16,
        d_ff: int = 24,
        bias: frozenset[str] = frozenset(),
        dropout: float = 0.0,
        wrap: Callable[[nn.Module, int], nn.Module] = lambda act, _: act,
    ) -> FFN:
        cls, options = part("ffn", name)
        torch.manual_seed(0)
        return cls(
            d_model=d_model,
            d_ff=d_ff,
            make_act=lambda d_ff: wrap(make_act(act, d_ff), d_ff),
            bias=bias,
            dropout=dropout,
            **options,
        )

    return make
