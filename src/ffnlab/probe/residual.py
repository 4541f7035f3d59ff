"""How large the residual stream is, and what attention and FFN add to it."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor, finfo, float32, nn
from torch.nn.functional import cosine_similarity

from ffnlab.probe.base import Captured, Observation, Probe, Site

PLACE = re.compile(r"blocks\.(\d+)(?:\.(attn|ffn)(\w*))?")


class Residual(Probe):
    """Root mean squares over the D dimensions; every number is a mean over the probed positions.

    - `probe/residual/L03/rms`: rms(x) of the stream x that enters block 3.
    - `probe/residual/L03/{attn_ratio,ffn_ratio}`: rms(b) / rms(x), where b is what the sublayer adds (scaled,
      and under `peri` and `out` normalised), and x the stream that b is added to, as it is carried on. Under
      `post` both are taken before the norm. Parallel sublayers add to the same stream.
    - `probe/residual/L03/{attn_cosine,ffn_cosine}`: cos(b, x), 0 where b = 0.
    A second FFN of a block is reported under `L03_extra`, a sublayer that a block lacks not at all.
    """

    def __init__(self, *, every: int):
        super().__init__(every=every)
        self.branches: dict[str, list[str]] = {}  # block -> its sublayers, in their order

    def watch(self, names: list[str]) -> list[Site]:
        for name in names:
            if match := PLACE.fullmatch(name):
                block = self.branches.setdefault(f"blocks.{match[1]}", [])
                block += [name] if match[2] else []
        outputs = [Site(name, "output") for names in self.branches.values() for name in names]
        return [Site(block, "input") for block in self.branches] + outputs

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        seen = Observation()
        for block, branches in self.branches.items():
            x = captured.values[Site(block, "input")]
            seen.scalars[f"probe/residual/L{int(block.split('.')[1]):02d}/rms"] = rms(x).mean().item()
            for name, branch, stream in added(model, block, branches, captured):
                match = PLACE.fullmatch(name)
                assert match
                key = f"probe/residual/L{int(match[1]):02d}{match[3]}/{match[2]}"
                ratio = rms(branch) / rms(stream).clamp(min=finfo(float32).tiny)
                seen.scalars[f"{key}_ratio"] = ratio.mean().item()
                cosine = cosine_similarity(branch.float(), stream.float(), dim=1)
                seen.scalars[f"{key}_cosine"] = cosine.mean().item()
        return seen


def added(
    model: nn.Module, block: str, branches: list[str], captured: Captured
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each sublayer with what it adds and what that is added to, (N, D).

    A module that joins a sublayer f to the stream x is asked itself: it applies f once, and here f has been
    applied.
    """
    settings: Any = getattr(model, "settings", None)
    parallel = getattr(settings, "order", None) == "parallel"
    joins: list[Any] = [
        model.get_submodule(f"{block}.residual.{name.rpartition('.')[2]}") for name in branches
    ]
    x = captured.values[Site(block, "input")]
    shared = x
    for join in joins if parallel else []:
        shared = join.carried(shared)
    for name, join in zip(branches, joins, strict=True):
        f = partial(lambda out, _: out, captured.values[Site(name, "output")])
        yield name, join.branch(x, f), shared if parallel else join.carried(x)
        x = x if parallel else join(x, f)


def rms(x: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
    """The root mean square of every row, in fp32."""
    return x.float().square().mean(1).sqrt()
