"""The loop on a real model: accumulation, divergence, probes, resume."""

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import zarr

from ffnlab import build
from ffnlab.errors import UserError
from ffnlab.facts import opening
from ffnlab.nn import crossover
from ffnlab.processes import Processes
from ffnlab.record.checkpoint import load
from ffnlab.recorded import Recorded
from ffnlab.run import run
from ffnlab.session import Session
from ffnlab.train import Diverged, gradients, update

TINY = [
    "model.n_layers=4", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", "data=counting",
    "tokenizer=byte", "train.batch_size=4", "train.eval_batches=2", "train.eval_every=4",
    "checkpoint.every=3", "checkpoint.keep_last=null", "probe.scan_tokens=64", "probe.tokens=16",
    "logger=none", "train.precision=fp32", "train.threads=1",
]  # fmt: skip


def start(out: Path, *overrides: str) -> dict:
    cfg, choices = build.compose([*TINY, *overrides, f"out={out}"])
    return run(cfg, choices)


def rows(out: Path) -> list[dict]:
    """metrics.jsonl without what a clock says."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "time_s" and not k.startswith("perf/")} for line in lines]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the run die as by SIGKILL right after the row of `step`, before any later save."""
    log = Recorded.log

    def dying(self, row):
        log(self, row)
        if row["step"] == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Recorded, "log", dying)


@pytest.mark.parametrize("split", [(8, 1), (2, 4)])
def test_accumulated_gradient_is_that_of_the_mean_over_all_tokens(split: tuple[int, int]):
    """T7, with a ragged batch: unequal counts of targets per micro-batch."""
    cfg, _ = build.compose([*TINY, "model.zero_out=false"])
    model = build.model(cfg, 97)
    x = torch.randint(0, 97, (8, 16))
    y = torch.randint(0, 97, (8, 16))
    y[5:, 3:] = -100
    mean = torch.nn.functional.cross_entropy(model(x)[..., :97].flatten(0, 1), y.flatten())
    mean.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    size, n = split
    micro = [(x[i * size : (i + 1) * size], y[i * size : (i + 1) * size]) for i in range(n)]
    got, count = gradients(model.loss, micro, nullcontext, torch.amp.GradScaler("cpu", enabled=False))
    assert count == int((y >= 0).sum())
    assert got == pytest.approx(mean.item(), rel=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("mid-run", marks=pytest.mark.slow),
        "at an evaluation",
        pytest.param("second epoch", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("optim", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
def test_resume_is_bit_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, optim: str):
    overrides = [f"optim={optim}", "skip=unet", "threshold=learned", "model.dropout=0.1", "train.steps=10"]
    if where == "second epoch":
        overrides += ["data.n_documents=8"]
    kill = {"mid-run": 7, "at an evaluation": 8, "second epoch": 9}[where]
    start(tmp_path / "whole", *overrides)
    with monkeypatch.context() as patch:
        stop_after(patch, kill)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "killed", *overrides)
    assert json.loads((tmp_path / "killed/run.json").read_text())["status"] == "interrupted"
    start(tmp_path / "killed", *overrides)
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")
    (a, trainer_a), (b, trainer_b) = (
        load(tmp_path / run / "checkpoints/step-000010") for run in ("whole", "killed")
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    flat_a, flat_b = (
        {(n, k): v for n, state in t["optimizer"].items() for k, v in state.items()}
        for t in (trainer_a, trainer_b)
    )
    assert flat_a.keys() == flat_b.keys()
    assert all(torch.equal(flat_a[key], flat_b[key]) for key in flat_a)


EVERY = "trace,crossings,gradients,sparsity,weights,top_tokens,coactivation,residual,attention,lambdas"
ALL_PROBES = f"probe=[default,{EVERY}]"


def test_probes_leave_training_bit_identical(tmp_path: Path):
    start(tmp_path / "with", "train.steps=5", ALL_PROBES, "probe.every=1", "model.dropout=0.1")
    start(tmp_path / "without", "train.steps=5", "probe=[]", "model.dropout=0.1")
    a, b = (load(tmp_path / run / "checkpoints/step-000005")[0] for run in ("with", "without"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    losses = [
        [row["train/loss"] for row in rows(tmp_path / run) if "train/loss" in row]
        for run in ("with", "without")
    ]
    assert losses[0] == losses[1]
    assert not (tmp_path / "without/neurons.zarr").exists()
    assert not (tmp_path / "without/tokens.json").exists()


def test_what_a_run_records_of_its_neurons(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Gradients of updates, a trace of every step, texts of the tokens, what each probe took; the sizes are
    said before."""
    probes = "probe=[default,trace,crossings,gradients,sparsity]"
    overrides = [probes, "probe.every=2", "probe.every_step_until=1", "probe.trace.layers=[1]"]
    start(tmp_path / "run", "train.steps=6", *overrides, "checkpoint.weights_every=3")
    said = capsys.readouterr().out
    assert "3 snapshots of the weights, " in said
    assert "(checkpoint.weights_every=3)" in said
    taken = json.loads((tmp_path / "run/run.json").read_text())["timings"]
    names = {"forward", "activity", "preact", "threshold", "gates", "routing"}
    assert set(taken["probes"]) == names | {"trace", "crossings", "gradients", "sparsity"}
    assert taken["probe_s"] == pytest.approx(sum(taken["probes"].values()))
    record = zarr.open_group(tmp_path / "run/neurons.zarr", mode="r")
    steps = {name: record[f"L01/{name}/step"][:].tolist() for name in ("gradients", "trace", "preact")}
    assert steps == {"gradients": [1, 2, 4, 6], "trace": [0, 1, 2, 3, 4, 5, 6], "preact": [0, 1, 2, 4, 6]}
    assert record["L01/trace/preact"].shape == (7, 16, 64)
    texts = json.loads((tmp_path / "run/tokens.json").read_text())
    ids = {*record["probe_batch/token"][:].tolist(), *record["scan/token"][:].flatten().tolist()}
    assert texts["seq_len"] == 16
    assert texts["text"] == {str(i): bytes([i]).decode(errors="replace") for i in ids - {255}} | (
        {"255": "<|endoftext|>"} if 255 in ids else {}
    )
    assert rows(tmp_path / "run")[-1]["probe/gradients/blocks.1.ffn.up/norm"] > 0


def test_a_large_record_is_announced_with_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ffnlab.facts.SAID_FROM", 0)
    cfg, _ = build.compose([*TINY, "train.steps=6"])
    session = Session(cfg, Processes(), {})
    (line,) = opening(session)
    assert (
        line
        == f"the record will take {session.record_bytes / 2**20:.0f} MiB (budget 1024 MiB) before compression"
    )


def test_a_finished_run_is_not_run_again_and_another_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    first = start(tmp_path / "run", "train.steps=3")
    before = (tmp_path / "run/metrics.jsonl").read_text()
    again = start(tmp_path / "run", "train.steps=3")
    assert "done already" in capsys.readouterr().out
    assert again["val/loss"] == first["val/loss"]
    assert (tmp_path / "run/metrics.jsonl").read_text() == before
    with pytest.raises(UserError, match="seed: 0 there, 1 here"):
        start(tmp_path / "run", "train.steps=3", "seed=1")


@pytest.mark.slow
def test_steps_may_grow_under_a_constant_schedule_only(tmp_path: Path):
    start(tmp_path / "long", "schedule=constant", "train.steps=6")
    start(tmp_path / "grown", "schedule=constant", "train.steps=3")
    start(tmp_path / "grown", "schedule=constant", "train.steps=6")
    a, b = (load(tmp_path / run / "checkpoints/step-000006")[0] for run in ("long", "grown"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    start(tmp_path / "fixed", "train.steps=3")
    with pytest.raises(UserError, match=r"train\.steps: 3 there, 6 here"):
        start(tmp_path / "fixed", "train.steps=6")


def test_divergence_stops_before_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A weight turns NaN after update 4: the loss of update 5 is NaN, nothing after checkpoint 3 is saved."""
    observe = Recorded.observe

    def poisoning(self, step):
        row = observe(self, step)
        if step == 4:
            self.session.model.blocks[1]["ffn"].up.weight.data[0, 0] = math.nan
        return row

    monkeypatch.setattr(Recorded, "observe", poisoning)
    with pytest.raises(Diverged, match="step 5: the loss is nan"):
        start(tmp_path / "run", "train.steps=9", "train.eval_every=100")
    info = json.loads((tmp_path / "run/run.json").read_text())
    assert info["status"] == "diverged"
    assert "step 5" in info["diverged"]
    assert rows(tmp_path / "run")[-1]["step"] == 4
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    assert saved.name == "step-000003"
    assert all(torch.isfinite(t).all() for t in load(saved)[0].values())


def test_target_loss_stops_early(tmp_path: Path):
    final = start(tmp_path / "run", "train.steps=40", "train.target_loss=5.3")
    assert final["step"] < 40
    assert final["val/loss"] <= 5.3


@pytest.mark.slow
def test_untrained_row_and_learning(tmp_path: Path):
    final = start(tmp_path / "run", "train.steps=60", "checkpoint.every=60", "train.eval_every=60")
    first, *rest = rows(tmp_path / "run")
    assert first["step"] == 0
    assert first["val/loss"] == pytest.approx(math.log(256), abs=1e-4)
    assert "train/loss" not in first
    assert [row["step"] for row in rest] == list(range(1, 61))
    assert final["val/loss"] < 3.5


@pytest.mark.slow
def test_test_split_is_read_once_at_the_end(tmp_path: Path):
    """E106: selection never sees it."""
    final = start(tmp_path / "run", "train.steps=3", "data.test_frac=0.1")
    with_test = [row for row in rows(tmp_path / "run") if "test/loss" in row]
    assert len(with_test) == 1
    assert with_test[0]["step"] == 3
    assert final["test/loss"] == with_test[0]["test/loss"]


@pytest.mark.slow
def test_weights_snapshots_stay(tmp_path: Path):
    """E38: weights alone, every two steps, whatever the rotation of checkpoints."""
    start(tmp_path / "run", "train.steps=5", "checkpoint.weights_every=2", "checkpoint.keep_last=1")
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step-000005", *(f"weights-{k:06d}.safetensors" for k in (0, 2, 4))]


def test_dropout_reaches_embedding_attention_branches_and_hidden_units():
    cfg, _ = build.compose([*TINY, "model.dropout=0.5", "ffn.dropout=0.5"])
    model = build.model(cfg, 97)
    x = torch.ones(2, 16, dtype=torch.long)
    seen = {}
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.update(stream=args[0]))
    model(x)
    dropped = (seen["stream"] == 0).float().mean()
    assert 0.3 < dropped < 0.7  # the stream that enters block 0
    assert model.blocks[0]["attn"].dropout == model.blocks[0]["residual"]["attn"].drop.p == 0.5
    assert model.blocks[0]["ffn"].dropout.p == 0.5


def test_fp16_overflow_leaves_every_parameter_alone():
    cfg, _ = build.compose(TINY)
    model = build.model(cfg, 97)
    optimizer = build.optimizer(cfg, model)
    scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=1024.0)
    x = torch.randint(0, 97, (2, 16))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scaler.scale(model.loss(x, x)).backward()
    for inner in optimizer.optimizers:
        scaler.unscale_(inner)
    update(optimizer, scaler, leave_out=True)
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_resume_needs_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "run", "train.steps=6")
    info = json.loads((tmp_path / "run/run.json").read_text())
    info["data"]["fingerprint"] = "another"
    (tmp_path / "run/run.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="data of this run have changed"):
        start(tmp_path / "run", "train.steps=6")


def test_an_error_before_the_first_step_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(self, checkpoint):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Session, "begin", broken)
    with pytest.raises(ZeroDivisionError):
        start(tmp_path / "run", "train.steps=3")
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed"
    assert "ZeroDivisionError: a bug" in (tmp_path / "run/error.txt").read_text()


@pytest.mark.slow
def test_auto_precision_of_a_resume_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def precision() -> str:
        return json.loads((tmp_path / "run/run.json").read_text())["precision"]

    monkeypatch.setattr("ffnlab.device.has_bf16", lambda device: False)
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "run", "train.steps=6", "train.precision=auto")
    assert precision() == "fp32"
    monkeypatch.setattr("ffnlab.device.has_bf16", lambda device: True)
    start(tmp_path / "run", "train.steps=6", "train.precision=auto")
    assert precision() == "fp32"


ROUTED = [
    "ffn=moe",
    "ffn.extra=true",
    "ffn.share=down",
    "ffn.l1=0.01",
    "ffn.l1_warmup=8",
    "threshold=learned",
]


@pytest.mark.slow
def test_experts_and_a_warming_l1_resume_bit_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    overrides = [*ROUTED, "train.steps=8", "model.dropout=0.1"]
    start(tmp_path / "whole", *overrides)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "killed", *overrides)
    start(tmp_path / "killed", *overrides)
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")
    a, b = (load(tmp_path / run / "checkpoints/step-000008")[0] for run in ("whole", "killed"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_probes_of_experts_leave_training_bit_identical(tmp_path: Path):
    start(tmp_path / "with", "train.steps=4", "probe.every=1", *ROUTED)
    start(tmp_path / "without", "train.steps=4", "probe=[]", *ROUTED)
    a, b = (load(tmp_path / run / "checkpoints/step-000004")[0] for run in ("with", "without"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_auto_kernel_decides_the_same_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
):
    """Layers near the crossover change their way during the run; the table is measured once and kept."""
    measured = []

    def timed(ffn: torch.nn.Module, *_: object) -> list[dict[str, float]]:
        measured.append(ffn)
        return [{"density": d, "dense_ms": 0.45 / d, "sparse_ms": 1.0} for d in (0.4, 0.5)]  # equal at 0.45

    monkeypatch.setattr(crossover, "timed", timed)
    monkeypatch.setattr(crossover, "EVERY", 2)
    monkeypatch.setattr(crossover, "MARGIN", 0.01)
    own = [
        "ffn.kernel=auto",
        "threshold=learned",
        "threshold.active_frac=0.45",
        "optim=adamw",
        "optim.lr=0.02",
    ]
    own += ["train.steps=12", "model.zero_out=false", f"train.precision={precision}"]
    start(tmp_path / "whole", *own)
    shares = [json.loads(line)["perf/sparse_frac"] for line in (tmp_path / "whole/metrics.jsonl").open()]
    assert len(set(shares)) > 1, shares
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "killed", *own)
    start(tmp_path / "killed", *own)
    assert len(measured) == 2  # one size of FFN, two runs, one of them in two sessions
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")
    a, b = (load(tmp_path / run / "checkpoints/step-000012")[0] for run in ("whole", "killed"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_sparse_kernel_trains_as_the_dense_one(tmp_path: Path):
    own = ["train.steps=8", "threshold=learned", "model.zero_out=false"]
    losses = []
    for kernel in ("dense", "sparse"):
        start(tmp_path / kernel, *own, f"ffn.kernel={kernel}")
        losses.append([row["val/loss"] for row in rows(tmp_path / kernel) if "val/loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
