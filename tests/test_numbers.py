"""Numbers that go bad in a real run: where they began, what is left out, what is gone back from."""

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ffnlab import build
from ffnlab.ending import complaints
from ffnlab.record.checkpoint import load
from ffnlab.recorded import Recorded
from ffnlab.run import run
from ffnlab.session import Session
from ffnlab.spikes import remember, spike_score
from ffnlab.train import Diverged

TINY = [
    "model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", "data=counting",
    "tokenizer=byte", "train.batch_size=2", "train.grad_accum=2", "train.eval_batches=2",
    "train.eval_every=100", "checkpoint.every=3", "train.steps=8", "model.dropout=0.1", "skip=none",
    "probe=gradients", "probe.every=1", "probe.scan_tokens=0", "probe.tokens=16", "logger=none",
    "train.precision=fp32", "train.threads=1", "model.zero_out=false",
]  # fmt: skip


def start(out: Path, *overrides: str) -> dict:
    cfg, choices = build.compose([*TINY, *overrides, f"out={out}"])
    return run(cfg, choices)


def rows(out: Path) -> list[dict]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "time_s" and not k.startswith("perf/")} for line in lines]


def info(out: Path) -> dict:
    return json.loads((out / "run.json").read_text())


def report(out: Path, step: int) -> dict:
    return json.loads((out / f"diagnosis-{step:06d}.json").read_text())


def assert_same(a: Path, b: Path, step: int) -> None:
    assert rows(a) == rows(b)
    (wa, ta), (wb, tb) = (load(out / f"checkpoints/step-{step:06d}") for out in (a, b))
    assert all(torch.equal(wa[name], wb[name]) for name in wa)
    assert ta["progress"] | {"time_s": 0} == tb["progress"] | {"time_s": 0}
    for name, state in ta["optimizer"].items():
        assert all(torch.equal(v, tb["optimizer"][name][k]) for k, v in state.items())


class Poison:
    """Makes one module put out what it should not, in the updates whose batches are named."""

    def __init__(self, patch: pytest.MonkeyPatch, bad: set[int], module: str, change: Callable[[Any], Any]):
        self.on = False
        batches, init = Session.batches, Session.__init__

        def noting(session, step):
            self.on = step in bad
            return batches(session, step)

        def built(session, *args):
            init(session, *args)
            hook = lambda m, a, out: change(out) if self.on and m.training else None  # noqa: E731
            session.model.get_submodule(module).register_forward_hook(hook)

        patch.setattr(Session, "batches", noting)
        patch.setattr(Session, "__init__", built)


class Backward(torch.autograd.Function):
    """The identity, whose gradient is infinite in one place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        bad = grads[0].clone()
        bad.view(-1)[0] = math.inf
        return bad


def one_nan(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[3] = math.nan
    return x


def test_a_loss_that_is_nan_is_traced_to_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The output of L01's `up` has one NaN in update 5: named, with counts; checkpoint 3 is the last."""
    Poison(monkeypatch, {5}, "blocks.1.ffn.up", one_nan)
    where = r"begins in the output of blocks\.1\.ffn\.up, 1 of 2,048 values \(diagnosis-000005\.json\)"
    with pytest.raises(Diverged, match=rf"step 5: the loss is nan; nan or inf {where}"):
        start(tmp_path / "run")
    found = report(tmp_path / "run", 5)
    assert found["what"] == "step 5: the loss is nan"
    assert found["row_before"]["step"] == 4
    (process,) = found["processes"]
    first = process["first_activation"]
    assert (first["module"], first["layer"], first["nan"], first["inf"]) == ("blocks.1.ffn.up", "L01", 1, 0)
    assert first["parameters"] == []
    assert process["losses"] == ["nan", "nan"]
    assert process["largest"]["blocks.0.ffn.up"] > 0
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-000003"]
    assert info(tmp_path / "run")["status"] == "diverged"
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_a_loss_that_is_nan_before_the_first_update_is_traced_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An activation of one's own may be NaN from the start: there is no batch of an update yet."""
    init = Session.__init__

    def built(session, *args):
        init(session, *args)
        session.model.get_submodule("blocks.1.ffn.act").register_forward_hook(lambda m, a, out: one_nan(out))

    monkeypatch.setattr(Session, "__init__", built)
    where = r"begins in the output of blocks\.1\.ffn\.act, 1 of 2,048 values \(diagnosis-000000\.json\)"
    with pytest.raises(Diverged, match=rf"step 0: val/loss is nan; nan or inf {where}"):
        start(tmp_path / "run")
    assert info(tmp_path / "run")["status"] == "diverged"


def test_a_gradient_that_is_infinite_is_traced_to_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Poison(monkeypatch, {4}, "blocks.1.ffn.act", Backward.apply)
    with pytest.raises(
        Diverged, match=r"step 4: the gradient norm is (nan|inf) \(loss \d.*; nan or inf begins in"
    ):
        start(tmp_path / "run")
    (process,) = report(tmp_path / "run", 4)["processes"]
    assert process["first_activation"] is None
    gradient = process["first_gradient"]  # it passes back through the activation to what comes before it
    assert gradient["name"].startswith("blocks.1.ffn.up")
    assert gradient["inf"] + gradient["nan"] >= 1


def test_a_parameter_that_is_nan_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    observe = Recorded.observe

    def poisoning(self, step):
        if step == 4:
            self.session.model.blocks[0]["ffn"].down.weight.data[1, 2] = math.nan
        return observe(self, step)

    monkeypatch.setattr(Recorded, "observe", poisoning)
    with pytest.raises(Diverged, match=r"output of blocks\.0\.ffn\.down, .* its weight holds some"):
        start(tmp_path / "run")
    (process,) = report(tmp_path / "run", 5)["processes"]
    assert process["parameters"] == {"blocks.0.ffn.down.weight": {"nan": 1, "inf": 0, "of_values": 1024}}


SKIP = ("train.on_nonfinite=skip", "train.max_skips=3", "train.max_skips_in_a_row=2")


@pytest.mark.filterwarnings("ignore:step . the loss is nan")
def test_bad_updates_are_left_out_and_a_resume_counts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Updates 2, 4 and 5 change nothing; killed between 4 and 5 the end is the same, with the same counts."""
    Poison(monkeypatch, {2, 4, 5}, "blocks.0.attn", one_nan)
    with pytest.warns(UserWarning, match=r"step 5: the loss is nan; .* left out \(3 of at most 3\)"):
        start(tmp_path / "whole", *SKIP)
    log = Recorded.log

    def dying(self, row):
        log(self, row)
        if row["step"] == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Recorded, "log", dying)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "killed", *SKIP)
    start(tmp_path / "killed", *SKIP)
    assert_same(tmp_path / "whole", tmp_path / "killed", 8)
    seen = {row["step"]: row for row in rows(tmp_path / "whole")}
    assert [seen[k]["optim/skips"] for k in range(1, 9)] == [0, 1, 1, 2, 3, 3, 3, 3]
    assert [seen[k].get("train/loss/nonfinite") for k in (1, 2, 3, 4)] == [None, "nan", None, "nan"]
    assert info(tmp_path / "killed")["skips"] == 3
    assert info(tmp_path / "killed")["status"] == "done"
    for step in (2, 4, 5):
        assert report(tmp_path / "killed", step)["where"].startswith("nan or inf begins in the output of")


@pytest.mark.filterwarnings("ignore:step . the loss is nan")
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({2, 3, 4}, r"step 4.*train\.max_skips_in_a_row=2 updates were left out before"),
        pytest.param({1, 3, 5, 7}, r"step 7.*train\.max_skips=3 updates", marks=pytest.mark.slow),
    ],
)
def test_skips_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: set[int], words: str):
    Poison(monkeypatch, bad, "blocks.0.attn", one_nan)
    with pytest.raises(Diverged, match=words):
        start(tmp_path / "run", *SKIP)
    assert info(tmp_path / "run")["status"] == "diverged"


def test_spike_score_is_that_of_a_sample():
    values = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    recent = [(a, b) for a, b in values.tolist()]
    scores = (torch.tensor([3.0, 1.0]) - values.mean(0)) / values.std(0)
    assert spike_score(recent, 40, (3.0, 1.0)) == pytest.approx(scores.max().item(), rel=1e-12)
    assert spike_score(recent, 41, (3.0, 1.0)) > 0  # 20 of 41
    assert spike_score(recent, 42, (3.0, 1.0)) == 0
    assert spike_score([(1.0, 1.0)] * 30, 40, (9.0, 9.0)) == 0
    remember(recent, 5, (7.0, 7.0))
    assert recent[-1] == (7.0, 7.0)
    assert len(recent) == 5


SPIKES = ("train.spike_window=6", "train.spike_sigma=5", "train.steps=10", "optim.lr=1e-4")


def larger(x: torch.Tensor) -> torch.Tensor:
    return 100 * x


@pytest.mark.parametrize("action", [pytest.param("log", marks=pytest.mark.slow), "rewind"])
def test_a_spike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str):
    """Batch 8 blows up: it is on record; with rewind, update 7 (after checkpoint 6) and 8 take batches 9 and
    10, also when the run is killed after it went back.
    """
    overrides = (*SPIKES, f"train.on_spike={action}")
    Poison(monkeypatch, {8}, "blocks.1.ffn.up", larger)
    taken = []
    batches = Session.batches
    monkeypatch.setattr(Session, "batches", lambda s, step: (taken.append(step), batches(s, step))[1])
    said = "back to step-000006" if action == "rewind" else "the run goes on"
    with pytest.warns(UserWarning, match=rf"step 8 is a spike \(train/loss .*\): {said}"):
        start(tmp_path / "whole", *overrides)
    after = [7, 8, 9, 10, 11, 12] if action == "rewind" else [7, 8, 9, 10]
    assert taken == [
        1,
        2,
        3,
        4,
        5,
        6,
        *([7, 8] if action == "rewind" else []),
        *(after[2:] if action == "rewind" else after),
    ]
    (entry,) = info(tmp_path / "whole")["spikes"]
    assert (entry["step"], entry["passed_over"]) == (8, 0)
    assert entry["optim/spike_score"] > 5
    seen = rows(tmp_path / "whole")
    assert [row["step"] for row in seen] == list(range(11))
    assert (seen[8]["optim/spike_score"] > 5) == (action == "log")
    log = Recorded.log

    def dying(self, row):
        log(self, row)
        if row["step"] == 8:
            raise KeyboardInterrupt

    with warnings.catch_warnings(action="ignore"):
        with monkeypatch.context() as patch:
            patch.setattr(Recorded, "log", dying)
            with pytest.raises(KeyboardInterrupt):
                start(tmp_path / "killed", *overrides)
        start(tmp_path / "killed", *overrides)
    assert_same(tmp_path / "whole", tmp_path / "killed", 10)
    assert info(tmp_path / "killed")["spikes"] == [entry]


@pytest.mark.slow
def test_going_back_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A spike that no other batch mends is let through in the end."""
    monkeypatch.setattr("ffnlab.trouble.MAX_REWINDS", 2)
    Poison(monkeypatch, set(range(8, 100)), "blocks.1.ffn.up", larger)
    with pytest.warns(UserWarning, match="the run went back 2 times before and goes on now"):
        start(tmp_path / "run", *SPIKES, "train.on_spike=rewind")
    spikes = info(tmp_path / "run")["spikes"]
    assert [entry["then"] for entry in spikes][:2] == ["back to step-000006"] * 2
    assert info(tmp_path / "run")["status"] == "done"


def test_a_run_that_died_says_so(tmp_path: Path):
    """optim.lr=1e6 ends without an error, with a gradient of exactly 0: no update changes it any more."""
    with pytest.warns(UserWarning, match="the gradient is exactly 0 from step . on"):
        start(tmp_path / "run", "optim.lr=1e6", "probe=[]")
    assert info(tmp_path / "run")["status"] == "done"
    assert any("the network is dead" in line for line in info(tmp_path / "run")["warnings"])


def test_what_is_complained_about():
    fine = [
        {"step": 0, "val/loss": 5.0},
        {"step": 1, "optim/grad_norm": 0.0},
        {"step": 2, "optim/grad_norm": 1.0},
    ]
    assert complaints(fine) == []
    dead = [*fine, *({"step": k, "optim/grad_norm": 0.0} for k in (3, 4)), {"step": 4, "val/loss": 6.0}]
    first, second = complaints(dead)
    assert first.startswith("the gradient is exactly 0 from step 3 on")
    assert second.startswith("val/loss ended at 6.0000, above the 5.0000 of the untrained model")
