"""Skips across blocks: the stream after an early block joins the stream before a late one."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.nn.stream import StreamPart

GATE_INPUTS = 12  # dimensions of the stream that a gate reads


class NoSkip(StreamPart):
    """skip=none."""

    def __init__(self, *, d_model: int, n_layers: int):
        super().__init__()


class Pairs(StreamPart):
    """Base: the stream after block i is kept, and joins before block j, for each pair (i, j).

    pairs: None for the rule (i, n-1-i), 1 <= i < n/2 (block 0 and the last block have none); `drop` names the
    receiving layers that lose theirs.
    """

    def __init__(self, *, n_layers: int, pairs: Sequence[Sequence[int]] | None, drop: Sequence[int]):
        super().__init__()
        self.pairs = choose_pairs(n_layers, pairs, drop)

    def join(self, i: int, j: int, x: Tensor, kept: Tensor) -> Tensor:
        """What enters block j."""
        raise NotImplementedError

    def before(self, i: int, x: Tensor, ctx: Any) -> Tensor:
        for source, target in self.pairs:
            if target == i:
                x = self.join(source, target, x, ctx.saved[source])
        return x

    def after(self, i: int, x: Tensor, ctx: Any) -> Tensor:
        if any(source == i for source, _ in self.pairs):
            ctx.saved[i] = x
        return x


class UNet(Pairs):
    """Gated U-net skips: x <- x + gate_ij * (the stream after block i).

    gate: `sigmoid` is sigmoid(g) with one number g per pair, `vector` the same with one g per dimension,
    `input` is sigmoid(w . x[:12] + g) of the stream x that receives, w = 0 at the start, `scalar` one free
    number; all start at sigmoid(init). Source: modded-nanogpt records 11 and 32.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_layers: int,
        pairs: Sequence[Sequence[int]] | None,
        drop: Sequence[int],
        gate: str,
        init: float,
    ):
        super().__init__(n_layers=n_layers, pairs=pairs, drop=drop)
        self.kind = gate
        shape = {"sigmoid": (), "scalar": (), "input": (), "vector": (d_model,)}.get(gate)
        if shape is None:
            raise UserError(f"skip.gate={gate!r}: expected sigmoid, scalar, vector or input")
        start = 1 / (1 + math.exp(-init)) if gate == "scalar" else init
        for i, j in self.pairs:
            self.register_parameter(gate_name(i, j), nn.Parameter(torch.full(shape, float(start))))
            if gate == "input":
                w = nn.Parameter(torch.zeros(min(GATE_INPUTS, d_model)))
                self.register_parameter(f"{gate_name(i, j)}_w", w)

    def gate(self, i: int, j: int) -> Tensor:
        """The factor on the skip from block i to block j; of a gate that reads x, its value at x[:12] = 0."""
        g = getattr(self, gate_name(i, j))
        return g if self.kind == "scalar" else torch.sigmoid(g)

    def join(self, i: int, j: int, x: Tensor, kept: Tensor) -> Tensor:
        if self.kind == "input":
            w = getattr(self, f"{gate_name(i, j)}_w")
            g = x[..., : len(w)] @ w + getattr(self, gate_name(i, j))
            return x + torch.sigmoid(g).unsqueeze(-1) * kept
        return x + self.gate(i, j) * kept

    def values(self) -> dict[str, Tensor]:
        """`skip_01_04`: the gate of each pair, a number or (D,)."""
        return {f"skip_{i:02d}_{j:02d}": self.gate(i, j).detach() for i, j in self.pairs}


class UNetConcat(Pairs):
    """Ungated U-net skips by concatenation: x <- x + W_ij [x; the stream after block i], W (D, 2D).

    U-ViT's Linear(concat) (Bao et al., arXiv 2209.12152) with the stream kept beside it, so that a W that
    starts at 0 (`model.zero_out`, as all projections into the stream) starts as no skip.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_layers: int,
        pairs: Sequence[Sequence[int]] | None,
        drop: Sequence[int],
    ):
        super().__init__(n_layers=n_layers, pairs=pairs, drop=drop)
        for i, j in self.pairs:
            self.add_module(f"join_{i:02d}_{j:02d}", nn.Linear(2 * d_model, d_model, bias=False))

    def join(self, i: int, j: int, x: Tensor, kept: Tensor) -> Tensor:
        return x + self.get_submodule(f"join_{i:02d}_{j:02d}")(torch.cat([x, kept], dim=-1))


def gate_name(i: int, j: int) -> str:
    """Name of the parameter of pair (i, j)."""
    return f"gate_{i:02d}_{j:02d}"


def choose_pairs(
    n_layers: int, pairs: Sequence[Sequence[int]] | None, drop: Sequence[int]
) -> list[tuple[int, int]]:
    """The pairs (source, target), checked; see `UNet`."""
    if pairs is None:
        if n_layers < 4:
            raise UserError(
                f"skip=unet needs at least 4 layers, got model.n_layers={n_layers}; "
                "give skip.pairs, or skip=none"
            )
        pairs = [(i, n_layers - 1 - i) for i in range(1, (n_layers + 1) // 2) if i < n_layers - 1 - i]
    problems = [
        f"skip.pairs: got {list(pair)}, expected [i, j] with 0 <= i < j < model.n_layers={n_layers}"
        for pair in pairs
        if len(pair) != 2 or not 0 <= pair[0] < pair[1] < n_layers
    ]
    targets = [pair[-1] for pair in pairs]
    problems += [
        f"skip.drop: layer {layer} receives no skip; those that do: {sorted(targets)}"
        for layer in drop
        if layer not in targets
    ]
    if len({tuple(pair) for pair in pairs}) < len(pairs):
        problems.append(f"skip.pairs: a pair stands twice in {[list(pair) for pair in pairs]}")
    if problems:
        raise UserError(*problems)
    return [(pair[0], pair[1]) for pair in pairs if pair[1] not in drop]
