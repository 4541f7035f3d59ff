"""The notebooks run from top to bottom, as scripts and as notebooks, on runs that are made here."""

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
    """A folder with a study of two arms in it, two seeds of one and one of the other; one run has traces."""
    study = tmp_path_factory.mktemp("notebooks") / "outputs" / "tiny"
    for name, overrides in {"learned-s0-a1": ["threshold=learned"], "reglu-s0-b2": ["ffn=reglu"]}.items():
        cfg, choices = build.compose([*TINY, *overrides, "study=tiny", f"out={study / name}"])
        run(cfg, choices)
    shutil.copytree(study / "learned-s0-a1", study / "learned-s1-c3")
    config = study / "learned-s1-c3" / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"seed": 1}))
    record, rng = NeuronRecord(study / "reglu-s0-b2" / "neurons.zarr", budget_gib=1), np.random.default_rng(0)
    for step in range(4):
        record.add(
            step, "L00/trace/preact", rng.standard_normal((8, 64)).astype(np.float16), ("token", "neuron")
        )
    record.flush()
    return study.parent


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
    assert "learned-s1-c3" in shown
    assert "record traces with" in shown


def test_a_neuron_of_the_run_that_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FFNLAB_RUN", str(here / "tiny" / "reglu-s0-b2"))
    script(2)
    shown = capsys.readouterr().out
    assert "ffnlab.nn.ffn.reglu.ReGLU" in shown
    assert "of the tokens activate it at least once" in shown


def test_the_arms_of_the_newest_study(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(3)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[1:]] == [["learned", "2"], ["reglu", "1"]]
    assert rows[1].count("±") == 3  # both seeds are one run here: no spread, but it is said
    assert rows[2][4] == "-"  # without a C


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
