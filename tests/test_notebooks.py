"""The notebooks run from top to bottom, as scripts and as notebooks, on runs that are made here."""

import json
import runpy
import shutil
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import yaml

from ffnlab import build
from ffnlab.record.neurons import NeuronRecord
from ffnlab.run import run

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.py"))
TINY = (
    "data=counting",
    "tokenizer=byte",
    "model.n_layers=2",
    "model.d_model=32",
    "model.n_heads=2",
    "model.seq_len=32",
    "probe.scan_tokens=256",
    "train.steps=3",
    "train.batch_size=2",
    "train.eval_every=3",
    "train.eval_batches=1",
    "train.device=cpu",
    "train.precision=fp32",
    "logger=none",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study in it: two arms, two seeds of each; both runs of one have traces.

    The second seeds are copies with another loss; they were not trained.
    """
    study = tmp_path_factory.mktemp("notebooks") / "outputs" / "tiny"
    for name, override in {"reglu": "ffn=reglu", "learned": "threshold=learned"}.items():
        first, second = study / f"{name}-s0", study / f"{name}-s1"
        cfg, choices = build.compose([*TINY, override, "study=tiny", f"arm={name}", f"out={first}"])
        run(cfg, choices)
        if name == "reglu":
            trace(first)
        shutil.copytree(first, second)
        config = second / "config.yaml"
        config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"seed": 1}))
        rows = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
        changed = (row | ({"val/loss": row["val/loss"] + 0.01} if "val/loss" in row else {}) for row in rows)
        (second / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    return study.parent


def trace(path: Path) -> None:
    """Adds what probe=trace records of one layer: 8 tokens, the first neurons."""
    record, rng = NeuronRecord(path / "neurons.zarr", budget_gib=1), np.random.default_rng(0)
    for step in range(4):
        pre = rng.standard_normal((8, 64)).astype(np.float16)
        record.add(step, "L00/trace/preact", pre, ("token", "neuron"))
    record.flush()


@pytest.fixture
def here(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """outputs/ stands in the working folder, and no environment variable says otherwise."""
    monkeypatch.chdir(outputs.parent)
    for name in ("FFNLAB_RUN", "FFNLAB_STUDY"):
        monkeypatch.delenv(name, raising=False)
    matplotlib.use("agg")
    return outputs


def script(number: int) -> None:
    """Runs a notebook as a script, and draws what it left to be shown."""
    import matplotlib.pyplot as plt

    plt.close("all")
    (path,) = (path for path in NOTEBOOKS if path.name.startswith(f"{number:02}_"))
    try:
        runpy.run_path(str(path), run_name="__main__")
        for figure in map(plt.figure, plt.get_fignums()):
            assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
            figure.canvas.draw()
    finally:
        plt.close("all")


def test_geometry_needs_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib.use("agg")
    script(1)
    shown = capsys.readouterr().out
    assert "0.0361" in shown  # 1/sqrt(768)
    assert "+0.2622" in shown  # C for 30 %
    assert shown.endswith("0.0442\n")


def test_a_neuron_of_the_newest_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(2)
    shown = capsys.readouterr().out
    assert "learned-s1" in shown
    assert "record traces with" in shown


def test_a_neuron_of_the_run_that_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FFNLAB_RUN", str(here / "tiny" / "reglu-s0"))
    script(2)
    shown = capsys.readouterr().out
    assert "ffnlab.nn.ffn.reglu.ReGLU" in shown
    assert "of the tokens activate it at least once" in shown


def test_the_arms_of_the_newest_study(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(3)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name in ("reglu", "learned"):
        metrics = (here / "tiny" / f"{name}-s0" / "metrics.jsonl").read_text().splitlines()
        mean = json.loads(metrics[-1])["val/loss"] + 0.005  # of both seeds
        effect, cost = (row for row in rows if row[:1] == [name])
        assert effect[:2] == [name, "2"]
        assert float(effect[2]) == pytest.approx(mean, abs=1e-4)
        parameters = json.loads((here / "tiny" / f"{name}-s0" / "run.json").read_text())["parameters"]
        assert cost[1] == f"{parameters:,}"


@pytest.mark.parametrize("number", [2, 3])
def test_without_runs_it_says_how_to_make_one(
    number: int, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"make one with `python train\.py"):
        script(number)


@pytest.mark.slow  # starts a kernel
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_as_a_notebook(path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jupytext
    from nbclient import NotebookClient

    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = jupytext.read(path)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(here.parent)}}).execute()
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert pictures
