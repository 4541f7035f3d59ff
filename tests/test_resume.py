"""Exact resume: killed at any step and resumed, a run ends as if nothing had been, whatever it is made of."""

import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
import zarr.storage._local as local

from ffnlab import build
from ffnlab.errors import UserError
from ffnlab.nn import crossover
from ffnlab.probe import Observer
from ffnlab.processes import Processes
from ffnlab.record.checkpoint import load, save
from ffnlab.record.files import HashedFile
from ffnlab.record.rundir import read_info
from ffnlab.record.same import unequal
from ffnlab.recorded import Recorded
from ffnlab.run import run
from ffnlab.session import Session
from ffnlab.verbs.verify import findings

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TINY = [
    "model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", "model.dropout=0.1",
    "data=counting", "data.n_documents=4", "tokenizer=byte", "train.batch_size=4", "train.steps=8",
    "train.eval_every=4", "train.eval_batches=1", "checkpoint.every=3", "checkpoint.keep_last=null",
    "probe.every=3", "probe.every_step_until=1", "probe.scan_tokens=32", "probe.tokens=8", "logger=none",
    "train.threads=1",
]  # fmt: skip

Point = tuple[str, int]  # where a run is killed: what it does, at which step


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


ALL_PROBES = f"probe=[{','.join(names('probe'))}]"
SPARSE = {"mlp", "paired", "reglu", "reglu2", "tied_reglu"}  # FFNs that have a sparse way with a ReLU
# Checkpoints are made after steps 3, 6 and 8; validation is at 0, 4 and 8; the second epoch begins in step 4.
KILLS: dict[str, list[Point]] = {  # each run is killed and resumed twice
    "in the second epoch": [("row", 4), ("row", 7)],
    "evaluation": [("evaluation", 4), ("evaluation", 8)],
    "save": [("row", 5), ("save", 6)],
}
FACTORS: dict[str, dict[str, list[str]]] = {
    "ffn": {name: [f"ffn={name}"] for name in names("ffn")},
    "optim": {name: [f"optim={name}"] for name in names("optim")},
    "precision": {name: [f"train.precision={name}"] for name in ("fp32", "bf16")},
    "probes": {"none": ["probe=[]"], "default": [], "others": ["probe=[crossings,gradients]"]},
    "accumulation": {"1": [], "2": ["train.grad_accum=2", "train.batch_size=2"]},
    "memory": {"kept": [], "checkpointed": ["train.checkpoint_activations=true"]},
    "kernel": {name: [f"ffn.kernel={name}"] for name in crossover.KERNELS},
    "threshold": {"none": [], "learned": ["threshold=learned", "threshold.active_frac=0.3"]},
    "paths": {
        "plain": [],
        "skips": [
            "skip=unet",
            "skip.gate=input",
            "model.n_layers=4",
            "residual=peri",
            "residual.scale=learned",
        ],
        "stream": ["stream=[embed_norm,x0_lambdas,backout,smear]", "residual=post", "schedule=cosine"],
    },
    "killed": {name: [] for name in KILLS},
}
Case = dict[str, str]


def covering() -> list[Case]:
    """Every FFN meets two choices of every factor (all of three would double the cases), and those with a
    sparse way all kernels; every pair of the other choices meets at least once.
    """
    draw = random.Random(0)  # noqa: S311  # always the same cases
    cases = []
    for ffn in FACTORS["ffn"]:
        order = {f: draw.sample(list(choices), len(choices)) for f, choices in FACTORS.items()}
        order |= {"ffn": [ffn]} | ({} if ffn in SPARSE else {"kernel": ["dense"]})
        cases += [{f: row[k % len(row)] for f, row in order.items()} for k in range(2 + (ffn in SPARSE))]
    pairs = itertools.combinations([f for f in FACTORS if f != "ffn"], 2)
    todo = {frozenset([(f, x), (g, y)]) for f, g in pairs for x in FACTORS[f] for y in FACTORS[g]}
    todo = {pair for pair in todo if not any(pair <= case.items() for case in cases)}
    while todo:
        start = {"ffn": "mlp", **dict(min(todo, key=sorted))}  # one that is open yet
        tried = [{f: draw.choice(list(FACTORS[f])) for f in FACTORS} | start for _ in range(100)]
        cases.append(max(tried, key=lambda case: sum(pair <= case.items() for pair in todo)))
        todo = {pair for pair in todo if not pair <= cases[-1].items()}
    return cases


def named(case: Case) -> str:
    return " ".join(case.values())


def killing(patch: pytest.MonkeyPatch, what: str, step: int) -> None:
    """This process gets SIGKILL at a point of its run."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def after(owner: type, method: str, when: Callable[..., bool]) -> None:
        real = getattr(owner, method)

        def then_killed(*args: Any) -> Any:
            value = real(*args)
            if when(*args):
                kill()
            return value

        patch.setattr(owner, method, then_killed)

    if what == "row":
        after(Recorded, "log", lambda _, row: row["step"] == step)
    elif what == "test":
        after(Recorded, "log", lambda _, row: "test/loss" in row)
    elif what == "evaluation":
        after(Session, "validation", lambda session, _: session.at == step)
        after(Recorded, "observe", lambda recorded, at: setattr(recorded.session, "at", at) or False)
    elif what == "saved":
        after(Recorded, "save", lambda _, progress, last: progress.step == step)
    elif what == "save":
        after(HashedFile, "write", lambda file, _: f"step-{step:06d}" in str(file._file.name))
    else:
        raise ValueError(what)


def killed(start: Callable[[], object], what: str, step: int) -> None:
    """A child of this process runs `start` and dies of SIGKILL at a point."""
    child = os.fork()
    if child == 0:
        try:
            killing(pytest.MonkeyPatch(), what, step)
            start()
        finally:
            os._exit(1)  # it came past that point, or failed
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == -signal.SIGKILL, f"not killed at {what} {step}"


def start(cfg: dict[str, Any], choices: dict[str, Any], out: Path) -> dict[str, float]:
    return run({**cfg, "out": str(out)}, choices)


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed must not differ between two runs (the sparse way pays at up to half of the neurons), and
    what a run says of the machine and of the checkout takes longer than these runs.
    """
    rows = [{"density": d, "dense_ms": 1.0, "sparse_ms": d + 0.5} for d in (*crossover.DENSITIES, 0.6)]
    monkeypatch.setattr(crossover, "timed", lambda *_: rows)
    monkeypatch.setattr(crossover, "EVERY", 2)
    monkeypatch.setattr("ffnlab.recorded.ceiling", lambda _: 1e9)
    monkeypatch.setattr("ffnlab.facts.git_state", lambda: None)


@pytest.fixture(autouse=True)
def fed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], dict[int, set[str]]]:
    """The batches that updates of a run were made from, by step; one that a resume does again is there once
    if it is the same.
    """
    real = Session.batches

    def noted(session: Session, step: int) -> list:
        micro = real(session, step)
        text = hashlib.sha256(b"".join(t.numpy().tobytes() for pair in micro for t in pair)).hexdigest()
        with Path(f"{session.cfg['out']}.fed").open("a") as file:
            file.write(f"{step} {text}\n")
        return micro

    def found(out: Path) -> dict[int, set[str]]:
        steps: dict[int, set[str]] = {}
        for line in Path(f"{out}.fed").read_text().splitlines():
            step, text = line.split()
            steps.setdefault(int(step), set()).add(text)
        return steps

    monkeypatch.setattr(Session, "batches", noted)
    return found


def check(overrides: list[str], kills: list[Point], fed: Callable, tmp_path: Path) -> None:
    """A run that is killed at each of `kills`, one after the other, ends as one that is not."""
    cfg, choices = build.compose([*TINY, *overrides])
    whole, other = tmp_path / "whole", tmp_path / "killed"
    start(cfg, choices, whole)
    for what, step in kills:
        killed(lambda: start(cfg, choices, other), what, step)
    start(cfg, choices, other)
    assert list(unequal(whole, other)) == []
    assert fed(other) == fed(whole)
    assert all(len(each) == 1 for each in fed(whole).values())


@pytest.mark.filterwarnings("ignore:.*holds no checkpoint yet")
def test_killed_before_a_checkpoint_and_in_a_save(fed: Callable, tmp_path: Path):
    more = ["threshold=learned", "train.grad_accum=2", "train.batch_size=2", "optim=adamw"]
    check(more, [("row", 1), ("save", 6)], fed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(), ids=named)
def test_killed_and_resumed(case: Case, fed: Callable, tmp_path: Path):
    overrides = [word for factor, choice in case.items() for word in FACTORS[factor][choice]]
    check(overrides, KILLS[case["killed"]], fed, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*holds no checkpoint yet")
def test_killed_at_every_step(fed: Callable, tmp_path: Path):
    """One run, killed after each of its rows, with all probes; and between its last save and its status."""
    more = [ALL_PROBES, "threshold=learned", "model.n_layers=1"]
    check(more, [*(("row", step) for step in range(9)), ("saved", 8)], fed, tmp_path)


@pytest.mark.slow
def test_killed_after_the_test(fed: Callable, tmp_path: Path):
    """Between the row of the test and the status: it is tested again, and recorded once."""
    check(["data.test_frac=0.2", "data.n_documents=12"], [("test", 8), ("test", 8)], fed, tmp_path)
    rows = (tmp_path / "killed/metrics.jsonl").read_text().splitlines()
    assert sum("test/loss" in row for row in rows) == 1


def test_the_second_epoch_begins_in_step_4():
    cfg, _ = build.compose(TINY)
    session = Session(cfg, Processes(), {})
    assert 3 < session.data.windows_per_epoch / session.train.batch_size < 4


@pytest.mark.slow
def test_killed_after_the_budget_of_the_record_was_used_up(
    fed: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A resume neither records on, for small arrays would still fit, nor ends the record at another step."""
    monkeypatch.setattr(Observer, "check_budget", lambda *_, scans: 0)
    more = ["probe=[activity,trace]", "probe.every=1", "probe.budget_gib=1.4e-5"]
    with pytest.warns(UserWarning, match=r"has reached probe.budget_gib=1.4e-05 at step [45]:"):
        check(more, [("row", 4), ("row", 7)], fed, tmp_path)


WRITES = [
    (os, "fsync"),
    (os, "replace"),
    (os, "truncate"),
    (Path, "rename"),
    (Path, "unlink"),
    (local, "_put"),
]


def dying_at_write(patch: pytest.MonkeyPatch, n: int) -> None:
    """This process gets SIGKILL before or after its n-th write, sync, rename or removal of a file."""
    left = [n]

    def counted(real: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and n % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            value = real(*args, **options)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        return call

    for owner, name in WRITES:
        patch.setattr(owner, name, counted(getattr(owner, name)))
    # a builtin cannot be patched: the file of the metrics is one that counts
    patch.setattr("ffnlab.record.metrics.FileIO", type("File", (FileIO,), {"write": counted(FileIO.write)}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*holds no checkpoint yet")
def test_killed_at_any_write(fed: Callable, tmp_path: Path):
    """Of metrics, neurons, checkpoints, run.json and the lock; again and again in one run."""
    cfg, choices = build.compose([*TINY, "probe=activity", "checkpoint.every=2", "checkpoint.keep_last=2"])
    whole, other, ended, kills = tmp_path / "whole", tmp_path / "killed", list[Path](), 0
    start(cfg, choices, whole)
    draw, known = random.Random(0), dict[Path, str]()  # noqa: S311
    for n in draw.sample(range(1, 130), 16):
        child = os.fork()
        if child == 0:
            try:
                dying_at_write(pytest.MonkeyPatch(), n)
                start(cfg, choices, other)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        kills += code == -signal.SIGKILL
        if (other / "run.json").exists():
            assert known.setdefault(other, read_info(other)["id"]) == read_info(other)["id"]
        assert other not in known or (other / "run.json").exists()
        if code == 0:  # it came to its end before: another one
            ended.append(other)
            other = tmp_path / f"killed-{len(ended)}"
    start(cfg, choices, other)
    assert kills >= 10
    for each in (*ended, other):
        assert list(unequal(whole, each)) == []
        assert list(findings(each)) == []
        assert not [path for path in each.rglob("*") if path.name.endswith((".tmp", ".partial", ".old"))]


def test_the_same_seed_gives_the_same_run_and_another_seed_does_not(tmp_path: Path):
    """T8; and what `unequal` would see of a difference."""
    small = [*TINY, "train.steps=3", "model.n_layers=1", "train.eval_every=10"]
    for name, more in {"a": [], "b": [], "c": ["seed=1"]}.items():
        start(*build.compose([*small, *more]), tmp_path / name)
    a, b, c = (tmp_path / name for name in "abc")
    assert list(unequal(a, b)) == []
    said = "\n".join(unequal(a, c))
    for words in (
        "metrics.jsonl: line 1 (step 0 and 0)",
        "neurons.zarr/L00/",
        "step-000003: model /",
        "trainer /",
    ):
        assert words in said


def test_unequal_sees_one_bit_a_lost_row_and_a_lost_checkpoint(tmp_path: Path):
    start(*build.compose([*TINY, "train.steps=3", "model.n_layers=1"]), tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    lines = (tmp_path / "b/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b/metrics.jsonl").write_text("".join(lines[:-1]))
    zarr.open_group(tmp_path / "b/neurons.zarr")["L00/preact/mean"][1, 5] += 1e-6  # type: ignore[index]
    model, trainer = load(tmp_path / "b/checkpoints/step-000003")
    shutil.rmtree(tmp_path / "b/checkpoints")
    trainer["progress"]["time_s"] += 1
    name = next(iter(trainer["optimizer"]))
    next(iter(trainer["optimizer"][name].values())).view(torch.int32)[0] ^= 1
    save(tmp_path / "b", 3, model, trainer, None)
    save(tmp_path / "b", 2, model, trainer, None)
    found = list(unequal(tmp_path / "a", tmp_path / "b"))
    shutil.rmtree(tmp_path / "b/checkpoints/step-000003")
    assert list(unequal(tmp_path / "a", tmp_path / "b"))[2:] == [
        "checkpoints: the last is step-000003 and step-000002"
    ]
    assert found == [
        "metrics.jsonl: 4 and 3 lines; those that both have are equal",
        "neurons.zarr/L00/preact/mean: 1 of 3 rows differ, the first is row 1",
        f"checkpoints/step-000003: trainer /optimizer/{name}/momentum_buffer differ",
    ]


def test_what_differs_between_two_machines_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cfg, choices = build.compose([*TINY, "train.steps=4", "model.n_layers=1", "probe=[]"])
    killed(lambda: start(cfg, choices, tmp_path / "run"), "row", 4)
    info = json.loads((tmp_path / "run/run.json").read_text())
    info |= {"instruction_set": "x86_64 AVX2", "versions": {"torch": "2.0"}, "threads": 3}
    (tmp_path / "run/run.json").write_text(json.dumps(info | {"device": {"type": "cpu", "name": "Abacus"}}))
    with pytest.warns(UserWarning, match="not bit-exact") as caught:
        start(cfg, choices, tmp_path / "run")
    said = "\n".join(str(warning.message) for warning in caught)
    assert re.search(
        r"another processor \(.* instead of Abacus\); instruction set \(.* instead of x86_64 AVX2\)", said
    )
    assert f"torch ({torch.__version__} instead of 2.0): not bit-exact" in said
    assert "1 threads instead of 3 before: this resume is not bit-exact" in said
    with pytest.raises(UserError, match=r"train\.threads: 1 there, 2 here"):
        start(*build.compose([*TINY, "train.steps=4", "train.threads=2"]), tmp_path / "run")


@pytest.mark.slow
def test_twenty_runs_start_in_the_same_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without out=, on data that nobody has tokenised yet: twenty directories, each a whole run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FFNLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ffnlab.nn.rate.measure", lambda *_, **__: 1e9)
    cfg, choices = build.compose([*TINY, "train.steps=1", "model.n_layers=1", "probe=[]", "tokenizer=char"])
    gate, opened = os.pipe()
    children = []
    for _ in range(20):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                os.close(opened)
                os.read(gate, 1)  # until the parent lets all go at once
                run(cfg, choices)
                os._exit(0)
            finally:
                os._exit(1)
    os.close(opened)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 20
    runs = sorted((tmp_path / "outputs").iterdir())
    assert len(runs) == 20
    assert [line for path in runs for line in (*findings(path), *unequal(runs[0], path))] == []
