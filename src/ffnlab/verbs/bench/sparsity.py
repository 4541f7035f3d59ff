"""One FFN at one density, both ways: what `bench sparse` measures."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ffnlab import build, kernels
from ffnlab.config import settings
from ffnlab.device import DTYPES, autocast
from ffnlab.errors import UserError
from ffnlab.kernels.limits import Limits
from ffnlab.kernels.ops import rows_of
from ffnlab.kernels.reference import row_of
from ffnlab.nn.crossover import TOKENS as AUTO_TOKENS
from ffnlab.nn.crossover import crossover, pays, place, timed
from ffnlab.nn.ffn.base import FFN, GatedFFN
from ffnlab.nn.gpt import ModelSettings
from ffnlab.nn.penalty import take
from ffnlab.nn.rate import product
from ffnlab.nn.sparse import SparseWay, activation, active, linear, obstacle
from ffnlab.nn.threshold import FixedThreshold
from ffnlab.verbs.bench.contest import Part, alternate
from ffnlab.verbs.bench.steps import Stopwatch

PER_TOKEN = 20  # calls with one token for each round: they are short


class Timed:
    """A call that takes turns with others."""

    def __init__(self, call: Callable[[], Any], device: torch.device):
        self.call, self.clock = call, Stopwatch(device)
        self.seconds: list[float] = []

    def warm_up(self) -> None:
        self.call()

    def round(self) -> None:
        self.seconds.append(self.clock.timed(self.call)[1])


def figures(dense: list[float], sparse: list[float]) -> dict[str, Any]:
    """Medians of what both took in the same rounds, and the columns that only some rows fill."""
    return {
        "dense_ms": 1e3 * median(dense),
        "sparse_ms": 1e3 * median(sparse),
        "speedup": median(d / s for d, s in zip(dense, sparse, strict=True)),
        "auto": None,
        "useful_flop_per_s": None,
        "of_l2": None,
        "dense_saved_bytes": None,
        "sparse_saved_bytes": None,
    }


class Case:
    """The FFN of `cfg` with d_model and d_ff, its C placed for a density on `tokens` normal inputs."""

    def __init__(
        self,
        cfg: Mapping[str, Any],
        d_model: int,
        d_ff: int,
        density: float,
        precision: str,
        device: torch.device,
        tokens: int,
        limits: Limits | None,
        auto_limit: float,
    ):
        torch.manual_seed(0)
        self.auto_limit = auto_limit
        self.density, self.precision, self.device, self.limits = density, precision, device, limits
        self.dtype, self.autocast = DTYPES[precision], autocast(device, precision)
        self.ffn = ffn(cfg, d_model, d_ff)
        if why := obstacle(self.ffn) or kernels.unavailable(device, self.dtype):
            raise UserError(f"nothing to compare: {why}")
        self.ffn.act = FixedThreshold(init=0.0, active_frac=density, scope="layer")(
            activation(self.ffn)[0], d_ff
        )
        for matrix in (m for m in self.ffn.modules() if isinstance(m, nn.Linear)):
            nn.init.normal_(matrix.weight, std=matrix.in_features**-0.5)
        self.x = torch.randn(tokens, d_model).to(device)
        place(self.ffn.to(device), self.x)

    @property
    def sparse_matrices(self) -> int:
        """Matrices of which a token needs the rows of its active neurons only."""
        return 2 if isinstance(self.ffn, GatedFFN) else 1

    def rows(self, rounds: int) -> list[dict[str, Any]]:
        """The whole, the single products, one token."""
        common = {
            "shape": f"{self.ffn.d_model}x{self.ffn.d_ff}",
            "precision": self.precision,
            "density": self.density,
        }
        return [common | row for row in (self.whole(rounds), *self.singly(rounds), self.token(rounds))]

    def whole(self, rounds: int) -> dict[str, Any]:
        """Forward and backward."""
        rate = product(self.device, self.dtype)
        flops = self.ffn.flops_per_token() * len(self.x)

        def part(name: str, kernel: SparseWay | None) -> Part:
            def forward(x: Tensor) -> list[Tensor]:
                self.ffn.kernel = kernel
                return [self.ffn(x), *take(self.ffn)]

            return Part(name, self.ffn, forward, self.x, self.precision, flops, rate)

        dense, sparse = part("dense", None), part("sparse", SparseWay(on=True))
        alternate([dense, sparse], rounds)
        sparse_products = (
            3 * self.sparse_matrices + 2
        )  # 3 for each of their matrices, 2 backward of the dense one
        return {
            "section": "ffn",
            "name": type(self.ffn).__name__,
            **figures([t.both for t in dense.times], [t.both for t in sparse.times]),
            "bound": (1 + sparse_products) / (1 + sparse_products * self.density),
            "auto": "sparse" if pays(self.density, self.auto_limit, on=False) else "dense",
            "dense_saved_bytes": dense.saved_bytes,
            "sparse_saved_bytes": sparse.saved_bytes,
        }

    @torch.no_grad()
    def products(self) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Any]]]:
        """Each sparse product, and the dense one that it stands for, on the same operands."""
        way_in = self.ffn.gate if isinstance(self.ffn, GatedFFN) else self.ffn.up
        assert isinstance(way_in, nn.Linear)
        x, (w, bias) = self.x.to(self.dtype), linear(way_in, self.dtype)
        n = self.ffn.d_ff
        crow, idx, values = active(self.ffn, x, (w, bias))
        hidden = x.new_zeros(len(x), n)
        hidden[row_of(crow, idx), idx.long()] = values
        rows = rows_of(w, n)
        return {
            "compact": (lambda: (x @ w.T - 1).relu(), lambda: active(self.ffn, x, (w, bias))),
            "spmm": (lambda: hidden @ rows, lambda: kernels.spmm(crow, idx, values, rows)),
            "sddmm": (lambda: x @ rows.T, lambda: kernels.sddmm(crow, idx, x, rows)),
            # A copy of the pattern: that of the last call is not turned again.
            "spmm_t": (lambda: hidden.T @ x, lambda: kernels.spmm_t(crow, idx.clone(), values, x, n)),
        }

    @torch.no_grad()
    def singly(self, rounds: int) -> list[dict[str, Any]]:
        """Every product by itself."""
        rows = []
        for name, calls in self.products().items():
            dense, sparse = (Timed(call, self.device) for call in calls)
            alternate([dense, sparse], rounds)
            row = figures(dense.seconds, sparse.seconds)
            share = 1.0 if name == "compact" else self.density
            useful = 2 * self.ffn.d_model * self.ffn.d_ff * len(self.x) * share
            rate = 1e3 * useful / row["sparse_ms"]
            row |= {"bound": 1 / share, "useful_flop_per_s": rate}
            if self.limits and name != "compact":  # every two operations read a number
                row["of_l2"] = rate / 2 * self.dtype.itemsize / self.limits.l2_bytes_per_s
            rows.append({"section": "products", "name": name, **row})
        return rows

    @torch.no_grad()  # not inference_mode, in which autocast keeps nothing
    def token(self, rounds: int) -> dict[str, Any]:
        """One token forward."""
        way = SparseWay(on=True)

        def call(kernel: SparseWay | None) -> Callable[[], Tensor]:
            def forward() -> Tensor:
                self.ffn.kernel = kernel
                return self.ffn(self.x[:1])

            return forward

        dense, sparse = (Timed(call(kernel), self.device) for kernel in (None, way))
        self.ffn.eval()
        with self.autocast():  # one for all calls: both ways keep the matrices in its precision
            alternate([dense, sparse], PER_TOKEN * rounds)
        bound = (1 + self.sparse_matrices) / (1 + self.sparse_matrices * self.density)
        own = figures(dense.seconds, sparse.seconds)
        return {"section": "token", "name": type(self.ffn).__name__, **own, "bound": bound}


def auto_limit(
    cfg: Mapping[str, Any], d_model: int, d_ff: int, precision: str, device: torch.device, tokens: int
) -> float:
    """The density up to which `ffn.kernel=auto` goes the sparse way: timed anew, as before a run."""
    torch.manual_seed(0)
    made = ffn(cfg, d_model, d_ff).to(device)
    if obstacle(made) or kernels.unavailable(device, DTYPES[precision]):
        return 0.0
    return crossover(timed(made, min(tokens, AUTO_TOKENS), autocast(device, precision)))


def ffn(cfg: Mapping[str, Any], d_model: int, d_ff: int) -> FFN:
    """The FFN of a configuration in another size, without a threshold of its own."""
    width = {"expansion": d_ff / d_model, "match": "width", "d_ff": None, "expansion_by_layer": None}
    sizes = settings(ModelSettings, {**cfg["model"], "d_model": d_model, "n_layers": 1}, "model")
    made = build.ffn_maker({**cfg, "ffn": {**cfg["ffn"], **width}}, sizes)(0)
    if not isinstance(made, FFN):
        raise UserError(f"nothing to compare: {type(made).__name__} has no sparse form")
    return made
