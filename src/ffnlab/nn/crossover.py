"""Which way each FFN goes: dense, sparse, or (`auto`) the faster one at its density."""

import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ffnlab import kernels
from ffnlab.errors import UserError
from ffnlab.nn.ffn.base import FFN, FeedForward
from ffnlab.nn.gpt import GPT
from ffnlab.nn.rate import synchronize
from ffnlab.nn.sparse import SparseWay, activation, obstacle
from ffnlab.nn.threshold import Thresholded

KERNELS = ("dense", "sparse", "auto")
EVERY = 20  # updates from one decision to the next
DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.4)
MARGIN = 0.1  # a layer changes its way when its density is this much (a share) beyond the crossover
TOKENS = 1024  # at most, in the measurement of the crossover
ROUNDS = 3

Table = dict[str, list[dict[str, float]]]  # "768x3072" -> what was measured at each density
Autocast = Callable[[], AbstractContextManager]


class Kernels:
    """The ways of all FFNs of a model.

    dense: the plain products. sparse: all FFNs take the sparse way, from the first step on. auto: every
    `EVERY` updates each layer is looked at on fixed tokens, and goes the way that was the faster one at its
    density when both were timed before the first step. What was timed is kept with the run, so that a
    resume decides as the run did.
    """

    def __init__(self, model: GPT, mode: str, dtype: torch.dtype):
        self.model, self.mode = model, mode
        self.ffns = {name: m for name, m in model.named_modules() if isinstance(m, FFN)}
        self.table: Table = {}
        self.reason = None if mode == "dense" else self.unfit(dtype)
        if self.reason is not None and mode == "sparse":
            raise UserError(f"ffn.kernel=sparse: {self.reason}; ffn.kernel=dense computes it")
        if self.reason is not None:
            warnings.warn(f"ffn.kernel=auto stays dense: {self.reason}", stacklevel=2)
        self.ways: dict[str, SparseWay] = {}
        for name, ffn in self.ffns.items() if mode != "dense" and self.reason is None else ():
            ffn.kernel = self.ways[name] = SparseWay(on=mode == "sparse")

    def unfit(self, dtype: torch.dtype) -> str | None:
        """Why this model cannot go the sparse way, None if it can."""
        whole = next((m for m in self.model.modules() if isinstance(m, FeedForward)), None)
        if not self.ffns:
            return "the model has no FFN" if whole is None else f"{type(whole).__name__} has no sparse form"
        reasons = (obstacle(ffn) for ffn in self.ffns.values())
        device = next(self.model.parameters()).device
        return next((r for r in reasons if r is not None), None) or kernels.unavailable(device, dtype)

    def measure(self, known: Mapping[str, Any] | None, tokens: int, autocast: Autocast) -> Table:
        """The table of `auto`: what is known, else timed now with at most `tokens` tokens a call.

        A run that began without a kernel has an empty one, and stays dense where there is a kernel now; one
        that goes on without the kernel keeps the table that it has.
        """
        if self.mode == "auto" and known is not None and not (known and self.ways):
            self.stay_dense()
            return dict(known)
        if self.mode == "auto" and self.ways:
            self.table = checked(known or {})
            for ffn in self.ffns.values():
                if size(ffn) not in self.table:
                    self.table[size(ffn)] = timed(ffn, min(tokens, TOKENS), autocast)
        return self.table

    def stay_dense(self) -> None:
        """No FFN goes the sparse way any more."""
        for name in self.ways:
            self.ffns[name].kernel = None
        self.ways = {}

    def decide(self, update: int, tokens: Int[Tensor, "W T"], autocast: Autocast) -> None:
        """Before update `update`: look at the densities on `tokens` where it is time, and choose."""
        if self.mode != "auto" or not self.ways or (update - 1) % EVERY:
            return
        for name, density in self.densities(tokens, autocast).items():
            way, limit = self.ways[name], crossover(self.table[size(self.ffns[name])])
            way.on = pays(density, limit, on=way.on)

    @torch.no_grad()
    def densities(self, tokens: Int[Tensor, "W T"], autocast: Autocast) -> dict[str, float]:
        """The share of (token, neuron) pairs that are active, by FFN, in eval mode and on the dense way."""
        counts: dict[str, tuple[Tensor, int]] = {}

        def count(name: str) -> Callable[..., None]:
            def run(_act: nn.Module, _args: tuple, post: Tensor) -> None:
                counts[name] = (post.count_nonzero(), post.numel())

            return run

        modes = [(m, m.training) for m in self.model.modules()]
        hooks = [ffn.act.register_forward_hook(count(name)) for name, ffn in self.ffns.items()]
        try:
            self.model.eval()
            with autocast():
                self.model.hidden(tokens)
        finally:
            for hook in hooks:
                hook.remove()
            for module, training in modes:
                module.training = training
        return {name: float(n) / max(1, of) for name, (n, of) in counts.items()}

    def share(self) -> float:
        """The share of the FFNs that go the sparse way."""
        return sum(way.on for way in self.ways.values()) / max(1, len(self.ffns))

    def state(self) -> dict[str, bool]:
        """Which way each FFN goes, for a checkpoint."""
        return {name: way.on for name, way in self.ways.items()}

    def restore(self, state: Mapping[str, bool]) -> None:
        """The counterpart of `state`; without a kernel there is nothing to restore."""
        for name in state.keys() & self.ways.keys():
            self.ways[name].on = state[name]


def checked(known: Mapping[str, Any]) -> Table:
    """A table as run.json holds it; UserError where somebody changed it into something else."""
    keys = ("density", "dense_ms", "sparse_ms")
    for name, rows in known.items():
        good = isinstance(rows, list) and all(
            isinstance(row, dict) and all(isinstance(row.get(key), int | float) for key in keys)
            for row in rows
        )
        if not good or any(not 0 < row[key] < math.inf for row in rows for key in keys):
            raise UserError(
                f"run.json: kernels.{name} is not what was timed at the start (rows of {', '.join(keys)}, "
                "numbers above 0): restore it, or take `kernels` out and let it be timed anew, which may "
                "send layers another way"
            )
    return dict(known)


def size(ffn: FFN) -> str:
    """What the crossover depends on in one run: all its FFNs are of one kind."""
    return f"{ffn.d_model}x{ffn.d_ff}"


def pays(density: float, limit: float, *, on: bool) -> bool:
    """Whether `auto` takes the sparse way at a density, given the crossover and the way of before."""
    return density < limit * (1 + MARGIN if on else 1 - MARGIN)


def crossover(rows: list[dict[str, float]]) -> float:
    """The density up to which the sparse way is the faster one, by interpolation of the logarithms; 0 where
    it never is, the highest that was tried where it always is.
    """
    before = None
    for row in rows:
        gain = math.log(row["dense_ms"] / row["sparse_ms"])
        if gain <= 0:
            if before is None:
                return 0.0
            place = before[1] / (before[1] - gain)
            return before[0] * (row["density"] / before[0]) ** place
        before = (row["density"], gain)
    return 0.0 if before is None else before[0]


def timed(ffn: FFN, tokens: int, autocast: Autocast) -> list[dict[str, float]]:
    """Forward and backward of a copy of `ffn` both ways, on normal inputs and with a C for each density;
    ends where the dense way wins clearly.
    """
    twin = copy.deepcopy(ffn)
    act, _ = activation(twin)
    device = next(twin.parameters()).device
    rows = []
    for density in DENSITIES:
        c = nn.Parameter(torch.tensor(0.0, device=device))
        twin.act = Thresholded(act, c, active_frac=density, scope="layer")
        x = torch.randn(tokens, twin.d_model, device=device, generator=torch.Generator(device).manual_seed(0))
        with autocast():
            place(twin, x)
        ways = {"dense_ms": None, "sparse_ms": SparseWay(on=True)}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):  # the first one warms up
            for name, twin.kernel in ways.items():
                seconds[name].append(forward_backward(twin, x, autocast))
        row = {name: 1e3 * statistics.median(each[1:]) for name, each in seconds.items()}
        rows.append({"density": density, **row})
        if row["sparse_ms"] > 1.3 * row["dense_ms"]:
            break
    return rows


@torch.no_grad()
def place(ffn: FFN, x: Tensor) -> None:
    """Put C where the wanted share of the pre-activations lies above it."""
    act = ffn.act
    assert isinstance(act, Thresholded)
    with act.register_forward_pre_hook(lambda _, args: act.place(args[0].float())):
        ffn(x)


def forward_backward(ffn: FFN, x: Tensor, autocast: Autocast) -> float:
    """Seconds of both passes."""
    ffn.zero_grad()
    leaf = x.clone().requires_grad_()
    synchronize(x.device)
    start = time.perf_counter()
    with autocast():
        y = ffn(leaf)
    y.backward(torch.ones_like(y))
    synchronize(x.device)
    return time.perf_counter() - start
