"""What `bench ffn` compares, section by section, built from the configuration by build.py's functions."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ffnlab import build
from ffnlab.config import settings
from ffnlab.device import DTYPES, has_bf16, has_fp16
from ffnlab.nn.act.gelu import GELU
from ffnlab.nn.ffn.base import FeedForward
from ffnlab.nn.ffn.mlp import MLP
from ffnlab.nn.gpt import Context, ModelSettings, run_block, run_block_checkpointed
from ffnlab.nn.penalty import take
from ffnlab.nn.rate import product
from ffnlab.verbs.bench.contest import Part, windows

GATED = "glu"  # the gated unit in which activations are compared


class Entries:
    """Parts of one size on one input (B T D)."""

    def __init__(self, overrides: Sequence[str], device: torch.device, precision: str, tokens: int | None):
        self.overrides, self.device, self.precision = overrides, device, precision
        self.cfg = self.compose("ffn=mlp")
        self.sizes = settings(ModelSettings, self.cfg["model"], "model")
        self.x = torch.randn(*windows(self.cfg, tokens), self.sizes.d_model).to(device)
        self.products = {name: product(device, DTYPES[name]) for name in {*self.precisions_here(), precision}}
        self.mlp = self.part("mlp", self.ffn(self.cfg))

    def compose(self, *own: str) -> dict[str, Any]:
        """The configuration of one entry; the overrides of the command line come last."""
        return build.compose([*own, "ffn.match=params", *self.overrides])[0]

    def ffn(self, cfg: Mapping[str, Any]) -> FeedForward:
        """The FFN of layer 0."""
        made = build.ffn_maker(cfg, self.sizes)(0)
        assert isinstance(made, FeedForward)
        return made.to(self.device)

    def part(
        self, name: str, module: nn.Module, base: Part | None = None, *, forward: Any = None, **other: Any
    ) -> Part:
        """A contestant on the common input; `other` replaces its fields."""
        ffn = next(inner for inner in module.modules() if isinstance(inner, FeedForward))
        own: dict[str, Any] = {
            "forward": forward or (lambda x: [module(x), *take(module)]),
            "x": self.x,
            "precision": self.precision,
            "flops": ffn.flops_per_token() * self.x.shape[:-1].numel(),
            "product": self.products[other.get("precision", self.precision)],
            "base": base,
        }
        return Part(name, module, **own | other)

    def facts(self, part: Part) -> dict[str, Any]:
        """What a row says besides its figures."""
        ffn = next(inner for inner in part.module.modules() if isinstance(inner, FeedForward))
        experts, top_k = (getattr(ffn, name, None) for name in ("n_experts", "top_k"))
        return {"precision": part.precision, "d_ff": ffn.d_ff, "experts": experts, "top_k": top_k}

    def variants(self, names: Sequence[str]) -> list[Part]:
        """An FFN of every choice, each with the activation that it brings."""
        made = {name: self.ffn(self.compose(f"ffn={name}")) for name in names if name != "mlp"}
        return [self.mlp, *(self.part(name, ffn, self.mlp) for name, ffn in made.items())]

    def activations(self, names: Sequence[str]) -> list[Part]:
        """The plain MLP and a gated unit with every activation."""
        gated = self.compose(f"ffn={GATED}")
        parts = []
        for name in names:
            cfg = self.compose("ffn=mlp", f"act={name}")
            for unit, node in (("mlp", cfg), (GATED, {**gated, "act": cfg["act"]})):
                parts.append(self.part(f"{unit} {name}", self.ffn(node), self.mlp))
        return parts

    def one_call(self) -> list[Part]:
        """The same MLP with GELU called as modules and as one expression of functions."""
        d_model, d_ff = self.sizes.d_model, self.ffn(self.cfg).d_ff
        mlp = MLP(
            d_model=d_model, d_ff=d_ff, make_act=lambda width: GELU(d_ff=width), bias=frozenset(), dropout=0.0
        )
        up, down = (mlp.to(self.device).get_parameter(f"{matrix}.weight") for matrix in ("up", "down"))

        def expression(x: Tensor) -> list[Tensor]:
            return [F.linear(F.gelu(F.linear(x, up)), down)]

        modules = self.part("modules", mlp)
        return [modules, self.part("one expression", mlp, modules, forward=expression)]

    def precisions_here(self) -> list[str]:
        """fp32, and those that the hardware multiplies itself."""
        here = {"fp32": True, "bf16": has_bf16(self.device), "fp16": has_fp16(self.device)}
        return [name for name, there in here.items() if there]

    def precisions(self) -> list[Part]:
        """The plain MLP in every precision of this machine."""
        fp32 = self.part("fp32", self.mlp.module, precision="fp32")
        others = [name for name in self.precisions_here() if name != "fp32"]
        return [fp32, *(self.part(name, fp32.module, fp32, precision=name) for name in others)]

    def checkpointing(self) -> list[Part]:
        """A block without attention, run as training runs it with and without activation checkpointing."""
        layers = list(range(self.sizes.n_layers))
        block = build.blocks(self.cfg, dataclasses.replace(self.sizes, drop_attn=layers, drop_ffn=[]))[0]
        block.to(self.device)
        tokens = torch.zeros(self.x.shape[:-1], dtype=torch.long, device=self.device)

        def forward(run: Any, x: Tensor) -> list[Tensor]:
            ctx = Context(tokens)
            out = run(block, x, ctx)
            penalties, ctx.penalties = ctx.penalties or [], None
            return [out, *penalties]

        plain = self.part("plain", block, forward=partial(forward, run_block))
        checkpointed = partial(forward, run_block_checkpointed)
        return [plain, self.part("checkpointed", block, plain, forward=checkpointed)]
