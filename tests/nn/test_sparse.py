"""FFNs on the sparse way: the numbers of the dense one, less memory, and a choice that can be repeated."""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ffnlab import build
from ffnlab.errors import UserError
from ffnlab.nn import crossover
from ffnlab.nn.act.relu import ReLU2
from ffnlab.nn.crossover import Kernels
from ffnlab.nn.ffn.base import FFN
from ffnlab.nn.gpt import run_block_checkpointed
from ffnlab.nn.sparse import SparseWay, obstacle
from ffnlab.nn.threshold import FixedThreshold, LearnedThreshold, calibrate

ALL = frozenset({"gate", "up", "down"})
UNITS = ["mlp", "paired", "paired_init", "dual_path", "tied_reglu", "reglu", "reglu2", "swiglu"]
NONE = LearnedThreshold(init=0.0, active_frac=None, scope="layer")
THRESHOLDS: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "none": lambda act, _: act,
    "learned": LearnedThreshold(init=0.3, active_frac=None, scope="layer"),
    "negative": LearnedThreshold(init=-0.4, active_frac=None, scope="layer"),
    "per neuron": LearnedThreshold(init=0.2, active_frac=None, scope="neuron"),
    "fixed": FixedThreshold(init=0.5, active_frac=None, scope="layer"),
}


def results(ffn: FFN, x: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """y and every gradient of (y * fixed weights).sum()."""
    ffn.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = ffn(x)
    rng = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=rng).to(y.dtype))
    assert x.grad is not None
    grads = {name: p.grad for name, p in ffn.named_parameters() if p.grad is not None}
    return {"y": y.detach().float(), "x": x.grad, **grads}


def both(
    ffn: FFN, x: Tensor, dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    ffn.kernel = None
    dense = results(ffn, x, dtype)
    ffn.kernel = SparseWay(on=True)
    sparse = results(ffn, x, dtype)
    assert dense.keys() == sparse.keys()
    return dense, sparse


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


@pytest.mark.parametrize("bias", [frozenset(), ALL], ids=["no bias", "bias"])
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("unit", UNITS)
def test_equals_the_dense_way_with_every_gradient(make_ffn, unit: str, threshold: str, bias: frozenset[str]):
    acts = ["relu", "relu2", "relu6"] if unit in ("mlp", "reglu") else ["relu2"]
    for act in acts:
        ffn = make_ffn(unit, act, d_model=24, d_ff=41, bias=bias, wrap=THRESHOLDS[threshold])
        assert obstacle(ffn) is None
        torch.manual_seed(2)
        dense, sparse = both(ffn, 2 * torch.randn(3, 7, 24))
        for name, want in dense.items():
            torch.testing.assert_close(
                sparse[name], want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("unit", ["mlp", "reglu", "paired"])
def test_bf16_is_as_near_to_fp32_as_the_dense_way(make_ffn, unit: str):
    ffn = make_ffn(unit, d_model=64, d_ff=256, wrap=THRESHOLDS["learned"])
    torch.manual_seed(2)
    x = 2 * torch.randn(200, 64)
    exact, _ = both(ffn, x)
    dense, sparse = both(ffn, x, torch.bfloat16)
    for name, want in exact.items():
        assert distance(sparse[name], want) <= 1.5 * distance(dense[name], want) + 1e-3, name


def test_the_bias_of_a_gated_unit_has_its_gradient_summed_in_fp32(make_ffn):
    """Over 4,096 tokens: added up in bf16, it was half of what it is."""
    ffn = make_ffn("reglu", "relu2", d_model=16, d_ff=32, bias=ALL)
    torch.manual_seed(2)
    x = 2 * torch.randn(4096, 16)
    exact, _ = both(ffn, x)
    dense, sparse = both(ffn, x, torch.bfloat16)
    assert distance(sparse["up.bias"], exact["up.bias"]) <= 1.5 * distance(dense["up.bias"], exact["up.bias"])


@pytest.mark.parametrize(("unit", "threshold"), [("reglu", "none"), ("tied_reglu", "per neuron")])
def test_two_threads_give_the_same_gradients_again(make_ffn, unit: str, threshold: str):
    """With more pairs than a thread takes by itself."""
    ffn = make_ffn(unit, "relu2", d_model=16, d_ff=64, bias=ALL, wrap=THRESHOLDS[threshold])
    ffn.kernel = SparseWay(on=True)
    torch.manual_seed(2)
    x = 2 * torch.randn(2048, 16)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = {name: value.clone() for name, value in results(ffn, x).items()}
        for _ in range(5):
            assert all(torch.equal(value, first[name]) for name, value in results(ffn, x).items())
    finally:
        torch.set_num_threads(before)


def test_one_token_of_an_activation_with_a_formula_of_its_own(make_ffn):
    """It inherits the power of its parent, and is not computed by it."""

    class Doubled(ReLU2):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    ffn = make_ffn("mlp").eval()
    ffn.act = Doubled(d_ff=ffn.d_ff)
    with torch.no_grad():
        dense = ffn(x := torch.randn(1, 16))
        ffn.kernel = SparseWay(on=True)
        torch.testing.assert_close(ffn(x), dense)


def test_an_activation_may_leave_the_precision_of_autocast(make_ffn):
    class Scaled(ReLU2):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.ones(1)

    ffn = make_ffn("mlp", d_model=16, d_ff=64)
    ffn.act = Scaled(d_ff=64)
    dense, sparse = both(ffn, torch.randn(40, 16), torch.bfloat16)
    assert distance(sparse["y"], dense["y"]) < 0.02


@pytest.mark.parametrize("threshold", [-1e4, 1e4], ids=["all active", "none active"])
@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (2, 3, 24)])
def test_every_density_and_number_of_tokens(make_ffn, threshold: float, shape: tuple[int, ...]):
    c = LearnedThreshold(init=threshold, active_frac=None, scope="layer")
    ffn = make_ffn("mlp", "relu", d_model=24, d_ff=41, bias=ALL, wrap=c)
    dense, sparse = both(ffn, torch.randn(*shape))
    for name, want in dense.items():
        torch.testing.assert_close(sparse[name], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [frozenset(), ALL], ids=["no bias", "bias"])
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("unit", UNITS)
def test_one_token_alone_is_as_among_others(
    make_ffn, unit: str, threshold: str, bias: frozenset[str], dtype: torch.dtype
):
    """In sampling all is one call: it gives what the products give one by one, and the dense way but for
    rounding.
    """
    for act in ("relu", "relu2", "relu6"):
        if act != "relu2" and unit not in ("mlp", "reglu", "tied_reglu"):
            continue
        ffn = make_ffn(unit, act, d_model=45, d_ff=83, bias=bias, wrap=THRESHOLDS[threshold]).to(dtype).eval()
        way = SparseWay(on=True)
        torch.manual_seed(2)
        for x in 2 * torch.randn(5, 1, 1, 45, dtype=dtype):
            ffn.kernel = way
            with torch.no_grad():
                alone = ffn(x)
                ffn.kernel = None
                dense = ffn(x)
            ffn.kernel = way
            assert torch.equal(alone, ffn(x))  # where gradients are wanted, product by product
            tolerance = 1e-5 if dtype is torch.float32 else 0.05
            torch.testing.assert_close(alone, dense, rtol=tolerance, atol=tolerance)


def test_one_token_after_the_weights_have_changed(make_ffn):
    ffn = make_ffn("reglu", bias=ALL, wrap=THRESHOLDS["learned"]).eval()
    ffn.kernel, x = SparseWay(on=True), torch.randn(1, 16)
    for change in (
        lambda: ffn.gate.weight.mul_(-1),
        lambda: ffn.up.bias.add_(1),
        lambda: ffn.act.threshold.fill_(0.1),
        lambda: ffn.down.load_state_dict({"weight": torch.randn(16, 24), "bias": torch.ones(16)}),
        lambda: setattr(ffn, "down", nn.Linear(24, 16)),
        lambda: setattr(ffn.up, "weight", nn.Parameter(torch.randn(24, 16))),
        lambda: setattr(ffn.gate, "weight", nn.Parameter(torch.randn(16, 24).t())),
    ):
        with torch.no_grad():
            before = ffn(x)
            change()
            after, dense = ffn(x), ffn.down(ffn.hidden(x))
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, dense)


def test_weights_made_in_inference_mode(make_ffn):
    """They do not count their versions."""
    with torch.inference_mode():
        ffn = make_ffn("mlp").eval()
        ffn.kernel, x = SparseWay(on=True), torch.randn(1, 16)
        first = ffn(x)
        ffn.down.weight.mul_(2)
        torch.testing.assert_close(ffn(x), 2 * first)


def test_what_has_no_sparse_form_says_why(make_ffn):
    why = {
        ("mlp", "gelu"): "GELU is not zero",
        ("mlp", "top_k"): "TopK is not zero",
        ("swiglu", "silu"): "is not zero",
        ("low_rank", "relu2"): "LowRank",
        ("dynamic", "relu2"): "Dynamic",
    }
    for (unit, act), words in why.items():
        assert words in str(obstacle(make_ffn(unit, act)))


def test_a_variant_that_changes_a_formula_does_not_inherit_the_sparse_one(make_ffn):
    ffn = make_ffn("mlp")
    ffn.__class__ = type("Doubled", (type(ffn),), {"hidden": lambda self, x: 2 * self.act(self.up(x))})
    assert "Doubled has no sparse form" in str(obstacle(ffn))


def test_who_looks_sees_the_dense_way(make_ffn):
    """Probes and interventions hook the parts; without them the parts are not called."""
    ffn = make_ffn("mlp", d_ff=32)
    ffn.kernel = SparseWay(on=True)
    x, seen = torch.randn(5, 16), []
    with ffn.act.register_forward_hook(lambda m, args, post: seen.append(post)):
        ffn(x)
    ffn(x)
    assert [tuple(post.shape) for post in seen] == [(5, 32)]


def test_the_turned_matrix_is_kept_only_while_it_is_right(make_ffn):
    ffn = make_ffn("mlp")
    way = ffn.kernel = SparseWay(on=True)
    x = torch.randn(3, 16)
    with torch.no_grad():
        first = ffn(x)
        kept = way.kept
        assert torch.equal(ffn(x), first)
        assert way.kept is kept
        ffn.down.weight.mul_(2)
        torch.testing.assert_close(ffn(x), 2 * first)


@pytest.mark.parametrize("unit", ["mlp", "dual_path"])
@pytest.mark.parametrize("optim", [torch.optim.SGD, torch.optim.AdamW])
def test_the_turned_matrix_is_that_of_the_last_update(
    make_ffn, unit: str, optim: type[torch.optim.Optimizer]
):
    """A fused step changes the weights and leaves their version as it was."""
    ffn = make_ffn(unit)
    way, x = SparseWay(on=True), torch.randn(8, 16)
    inner = optim(ffn.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        with torch.no_grad():
            ffn.kernel = None
            dense = ffn(x)
            ffn.kernel = way
            torch.testing.assert_close(ffn(x), dense)
        ffn(x).square().sum().backward()
        inner.step()


def test_dropout_drops_hidden_values_and_keeps_their_mean(make_ffn):
    ffn = make_ffn("mlp", "relu", d_ff=64, dropout=0.5)
    x = torch.randn(1, 16)
    torch.manual_seed(0)
    with torch.no_grad():
        mean = torch.stack([SparseWay(on=True)(ffn, x)[0] for _ in range(2000)]).mean(0)
        want = ffn.eval()(x)
    assert distance(mean, want) < 0.1


def test_l1_penalty_is_the_same(make_ffn):
    ffn = make_ffn("reglu")
    ffn.l1 = torch.tensor(0.3)
    x = torch.randn(5, 16)
    ffn(x)
    want = ffn.penalty.item()
    ffn.kernel = SparseWay(on=True)
    ffn(x)
    assert ffn.penalty.item() == pytest.approx(want, rel=1e-5)


@contextmanager
def kept_bytes() -> Iterator[list[int]]:
    """Bytes that the forward pass keeps for the backward pass, each storage once."""
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    total: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield total
    total.append(sum(seen.values()))


@pytest.mark.parametrize("density", [0.05, 0.2])
def test_memory_kept_for_the_backward_pass_falls_with_the_density(make_ffn, density: float):
    """8 bytes a pair in fp32 (the neuron, the square), where the dense way keeps 4 for all."""
    c = FixedThreshold(init=0.0, active_frac=density, scope="layer")
    ffn = make_ffn("mlp", d_model=8, d_ff=400, wrap=c)
    x = torch.randn(500, 8)
    crossover.place(ffn, x)
    kept = {}
    for name, kernel in (("dense", None), ("sparse", SparseWay(on=True))):
        ffn.kernel = kernel
        with kept_bytes() as total:
            ffn(x)
        kept[name] = total[0] / (500 * 400)
    fixed = (
        4 * (500 * 8 + 3 * 400 * 8 + 2 * 501 + 1) / (500 * 400)
    )  # x, both matrices and the turned one, row starts
    assert kept["dense"] >= 4
    assert kept["sparse"] == pytest.approx(8 * density, abs=fixed + 0.05)


COMPILED = """
import sys, torch
from ffnlab.nn.act.relu import ReLU2
from ffnlab.nn.ffn.{unit} import {cls}
from ffnlab.nn.gpt import run_block_checkpointed
from ffnlab.nn.sparse import SparseWay
from ffnlab.nn.threshold import LearnedThreshold

c = LearnedThreshold(init=0.1, active_frac=None, scope="layer")
ffn = {cls}(d_model=32, d_ff=64, make_act=lambda f: c(ReLU2(d_ff=f), f), bias=frozenset(), dropout=0.0)
ffn.kernel = SparseWay(on=True)
compiled = torch.compile(ffn, fullgraph=True)
for scale in (1, 3):  # another number of active pairs
    x, found = scale * torch.randn(10, 32), []
    for f in (ffn, compiled):
        ffn.zero_grad()
        y = f(x)
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad for p in ffn.parameters())])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(a.abs().max()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "cls"), [("mlp", "MLP"), ("reglu", "ReGLU")])
def test_compiled_in_one_graph(unit: str, cls: str):
    """In a process of its own: the checks of shapes that the tests turn on cannot be compiled."""
    script = COMPILED.format(unit=unit, cls=cls)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


TINY = ["model.n_layers=4", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", "model.zero_out=false"]


def gpt(*overrides: str) -> Any:
    cfg, _ = build.compose([*TINY, *overrides])
    return build.model(cfg, 97)


@pytest.mark.parametrize("ffn", ["mlp", "reglu", "moe", "multi"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_whole_model(ffn: str, checkpointed: bool):
    model = gpt(f"ffn={ffn}", "threshold=learned", "act=relu2")
    if checkpointed:
        model.run_block = run_block_checkpointed
    tokens = torch.randint(0, 97, (2, 16))
    losses, grads = [], []
    for mode in ("dense", "sparse"):
        for module in model.modules():
            if isinstance(module, FFN):
                module.kernel = None
        chosen = Kernels(model, mode, torch.float32)
        assert chosen.share() == (mode == "sparse")
        model.zero_grad()
        loss = model.loss(tokens, tokens)
        loss.backward()
        losses.append(loss.item())
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_sparse_is_refused_and_auto_stays_dense_where_there_is_no_sparse_form():
    with pytest.raises(UserError, match="GELU is not zero"):
        Kernels(gpt("act=gelu"), "sparse", torch.float32)
    with pytest.warns(UserWarning, match="auto stays dense: SiLU"):
        assert Kernels(gpt("ffn=swiglu"), "auto", torch.float32).share() == 0
    with pytest.raises(UserError, match="fp32 and bf16"):
        Kernels(gpt(), "sparse", torch.float16)


def table(*gains: float) -> list[dict[str, float]]:
    return [
        {"density": d, "dense_ms": g, "sparse_ms": 1.0}
        for d, g in zip(crossover.DENSITIES, gains, strict=False)
    ]


def test_crossover_lies_where_the_gain_is_one():
    assert crossover.crossover(table(0.9)) == 0
    assert crossover.crossover(table(4, 3, 2, 1.5, 1.2)) == 0.4
    assert crossover.crossover(table(4, 2, 0.5)) == pytest.approx((0.05 * 0.1) ** 0.5)
    assert crossover.crossover([]) == 0


def test_auto_changes_its_mind_only_beyond_a_margin(monkeypatch: pytest.MonkeyPatch):
    model = gpt("ffn=mlp")
    chosen = Kernels(model, "auto", torch.float32)
    monkeypatch.setattr(crossover, "timed", lambda *_: table(4, 3, 2, 1.5, 1.0001)[:5])
    kept = chosen.measure(None, 64, torch.no_grad)
    assert set(kept) == {"16x64"}
    monkeypatch.setattr(crossover, "timed", lambda *_: pytest.fail("measured again"))
    assert chosen.measure(kept, 64, torch.no_grad) == kept
    steps = [(0.37, False), (0.35, True), (0.43, True), (0.45, False), (0.37, False)]  # the crossover is 0.4
    for i, (density, on) in enumerate(steps):
        monkeypatch.setattr(chosen, "densities", lambda *_, d=density: dict.fromkeys(chosen.ffns, d))
        chosen.decide(1 + i * crossover.EVERY, torch.zeros(1, 16).long(), torch.no_grad)
        assert chosen.share() == on, density
    state = chosen.state()
    chosen.restore(dict.fromkeys(state, True))
    assert chosen.share() == 1


def test_auto_goes_on_as_the_run_began_where_the_kernel_comes_or_goes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(crossover, "timed", lambda *_: pytest.fail("measured again"))
    came = Kernels(gpt("ffn=mlp"), "auto", torch.float32)
    assert came.measure({}, 64, torch.no_grad) == {}  # the run began without one
    came.decide(1, torch.zeros(1, 16).long(), torch.no_grad)
    assert came.share() == 0
    assert all(ffn.kernel is None for ffn in came.ffns.values())
    monkeypatch.setattr(crossover.kernels, "unavailable", lambda *_: "no compiler")
    with pytest.warns(UserWarning, match="stays dense: no compiler"):
        gone = Kernels(gpt("ffn=mlp"), "auto", torch.float32)
    known = {"16x64": table(4, 3, 2)}
    assert gone.measure(known, 64, torch.no_grad) == known  # for a later resume that has it again
    gone.restore({"blocks.0.ffn": True})
    assert gone.share() == 0


@pytest.mark.parametrize(
    "rows",
    [None, "x", [3], [{"density": 0.1, "dense_ms": 1.0}], [{"density": 0.1, "dense_ms": 1, "sparse_ms": 0}]],
)
def test_a_table_that_somebody_changed_is_refused(rows: Any):
    chosen = Kernels(gpt("ffn=mlp"), "auto", torch.float32)
    with pytest.raises(UserError, match=r"run\.json: kernels\.16x64 is not what was timed"):
        chosen.measure({"16x64": rows}, 64, torch.no_grad)


def test_density_is_that_of_the_activations():
    model = gpt("threshold=fixed", "threshold.active_frac=0.3")
    tokens = torch.randint(0, 97, (4, 16))
    calibrate(model, tokens)
    model.train()
    found = Kernels(model, "sparse", torch.float32).densities(tokens, torch.no_grad)
    assert list(found.values()) == pytest.approx([0.3] * 4, abs=2e-3)
    assert model.training


def test_timing_meets_the_densities_that_it_names(make_ffn):
    ffn = make_ffn("paired", d_model=16, d_ff=64)
    rows = crossover.timed(ffn, 64, torch.enable_grad)
    assert [row["density"] for row in rows] == list(crossover.DENSITIES[: len(rows)])
    assert all(row["dense_ms"] > 0 and row["sparse_ms"] > 0 for row in rows)
    twin = copy.deepcopy(ffn)
    twin.act = FixedThreshold(init=0.0, active_frac=0.1, scope="layer")(twin.act, 64)
    x = torch.randn(64, 16)
    crossover.place(twin, x)
    assert float((twin.hidden(x) > 0).float().mean()) == pytest.approx(0.1, abs=2e-3)
