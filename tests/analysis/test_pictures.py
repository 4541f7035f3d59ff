"""Figures as files: formats, the same bytes again, the command, the end of a run."""

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from PIL import Image

from ffnlab import build
from ffnlab.analysis import pictures
from ffnlab.analysis.at_end import STANDARD, at_end
from ffnlab.analysis.at_end import main as figures_of_the_end
from ffnlab.analysis.figures import Drawing, Options, entries
from ffnlab.analysis.pictures import FORMATS, render
from ffnlab.analysis.runs import Run
from ffnlab.cli import main
from ffnlab.run import run as train

BEGINS = {"png": b"\x89PNG\r\n", "svg": b"<?xml", "pdf": b"%PDF-", "gif": b"GIF89a"}
TINY = [
    "model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.seq_len=16", "data=counting",
    "tokenizer=byte", "train.batch_size=4", "train.eval_batches=2", "train.eval_every=4", "train.steps=4",
    "probe.scan_tokens=64", "probe.tokens=16", "logger=none", "train.precision=fp32", "train.threads=1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (kind == "gif") == (name != "threshold") else [pytest.mark.slow])
        for name in ("threshold", "preact_animation")
        for kind in FORMATS
    ],
)
def test_formats_and_the_same_bytes_again(recorded: Run, name: str, kind: str):
    drawings = [entries()[name].draw(recorded, Options()) for _ in range(2)]
    first, second = (render(d._replace(frames=d.frames[:3]), name, kind) for d in drawings)
    assert first.startswith(BEGINS[kind])
    assert first == second
    assert not re.search(rb"20\d\d-\d\d-\d\d|CreationDate|<dc:date>", first)
    if kind in ("png", "svg"):
        assert b"C, which" in first or b"Density of the" in first  # the caption
    if kind == "gif":
        image = Image.open(io.BytesIO(first))
        assert getattr(image, "n_frames", 1) == (3 if name == "preact_animation" else 1)


def test_a_users_own_style_changes_nothing(recorded: Run):
    entry = entries()["threshold"]
    expected = render(entry.draw(recorded, Options()), "threshold", "png")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "text.usetex": True}):
        assert render(entry.draw(recorded, Options()), "threshold", "png") == expected
        assert matplotlib.rcParams["font.size"] == 30


def test_the_command_draws_all_that_the_record_allows(recorded: Run, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(pictures, "render", lambda drawing, name, kind: name.encode())
    assert main(["figures", str(recorded.path), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    ours = [line for line in printed if not line.startswith("not drawn")]
    assert {Path(line).stem for line in ours} >= {*STANDARD, "lineage", "top_tokens", "preact_animation"}
    assert (tmp_path / "preact_animation.gif").read_bytes() == b"preact_animation"
    captions = json.loads((tmp_path / "captions.json").read_text(encoding="utf-8"))
    assert set(captions) == {Path(line).stem for line in ours}
    assert not (recorded.path / "figures").exists()


def test_figures_by_name_are_added_to_those_that_are_there(recorded: Run, tmp_path: Path, capsys):
    (tmp_path / "captions.json").write_text('{"other": "stays"}')
    arguments = [
        "figures",
        str(recorded.path),
        "loss",
        "threshold",
        "--format",
        "svg",
        "--out",
        str(tmp_path),
    ]
    assert main([*arguments, "--layer", "L01"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["captions.json", "loss.svg", "threshold.svg"]
    captions = json.loads((tmp_path / "captions.json").read_text())
    assert captions["other"] == "stays"
    assert re.search(r"at the last look: L01 [+]0.200\.$", captions["threshold"])


def test_what_the_command_cannot_do_it_says(recorded: Run, tmp_path: Path, capsys):
    for number, (arguments, said) in enumerate(
        (
            (["loss", "los"], "unknown figure 'los'. Did you mean 'loss'?"),
            (["loss", "--layer", "L9"], "unknown layer 'L9'"),
            (["up_norms", "--layer", "L01", "--neuron", "-1"], None),
            (["token_lines", "--neuron", "-1"], "--neuron -1: L00 has neurons 0 to 47"),
        )
    ):
        out = tmp_path / str(number)
        code = main(["figures", str(recorded.path), *arguments, "--out", str(out)])
        error = capsys.readouterr().err
        assert code == (0 if said is None else 1)
        assert said is None or said in error
        assert said is None or not out.exists()
    assert main(["figures", str(tmp_path / "none")]) == 1
    assert "none does not exist" in capsys.readouterr().err
    assert main(["figures"]) == 1
    assert main(["figures", "--list"]) == 0
    assert set(STANDARD) <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}


def test_a_figure_without_a_record_is_an_error_by_name_and_a_line_without(tmp_path: Path, capsys):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    assert main(["figures", str(tmp_path), "loss", "lineage"]) == 1
    assert "lineage: the run holds no" in (error := capsys.readouterr().err)
    assert "record it with probe=[default,trace]" in error
    assert (tmp_path / "figures" / "loss.png").exists()
    assert main(["figures", str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not drawn")]
    assert "neuron_trace, token_lines, lineage (probe=[default,trace])" in line


def test_a_run_that_is_done_draws_a_few_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The pictures of the end are files in the run directory, and what the trackers are shown."""
    from ffnlab.record.sinks import Sinks

    shown = []
    monkeypatch.setattr(Sinks, "image", lambda self, name, path, step: shown.append((name, path, step)))
    monkeypatch.setattr("ffnlab.ending.AT_END_S", 100)
    monkeypatch.setattr("ffnlab.analysis.at_end.PATIENCE_S", 90)
    cfg, choices = build.compose([*TINY, "threshold=learned", f"out={tmp_path / 'run'}"])
    train(cfg, choices, at_end)
    folder = tmp_path / "run" / "figures"
    assert shown == [(name, folder / f"{name}.png", 4) for name in STANDARD]
    assert {path.name for path in folder.iterdir()} == {
        "captions.json",
        *(f"{name}.png" for name in STANDARD),
    }


def test_one_figure_that_fails_takes_no_other_with_it(
    make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = make_run(tmp_path / "run", layers=["L00"], neurons=4, tokens=4, steps=2)

    def broken(run: Run, options: Options) -> Drawing:
        raise ZeroDivisionError("of a figure")

    spoilt = entries() | {"active_frac": entries()["loss"]._replace(draw=broken)}
    monkeypatch.setattr(pictures, "entries", lambda: spoilt)
    monkeypatch.setattr("ffnlab.errors.plain_warnings", lambda: None)  # pytest wants to see them
    with pytest.warns(UserWarning, match="figure active_frac: ZeroDivisionError: of a figure"):
        figures_of_the_end(path)
    assert capsys.readouterr().out.split() == [name for name in STANDARD if name != "active_frac"]


def test_the_end_is_not_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    monkeypatch.setattr("ffnlab.analysis.at_end.PATIENCE_S", 0.01)
    began = time.monotonic()
    with pytest.warns(UserWarning, match="no time for all figures; `ffnlab figures"):
        assert at_end(tmp_path) == []
    assert time.monotonic() - began < 2


@pytest.mark.slow
def test_a_process_that_exits_while_its_figures_are_drawn_ends_well(make_run, tmp_path: Path):
    """A thread in the middle of drawing would end it with an abort."""
    code = (
        "import sys; from pathlib import Path; from ffnlab import ending; from ffnlab.stop import Stop\n"
        "from ffnlab.analysis.at_end import at_end\n"
        "ending.AT_END_S = float(sys.argv[2]); ending.in_time(at_end, Path(sys.argv[1]), Stop())"
    )
    path = make_run(tmp_path / "run")
    for patience in ("0.1", "1.5"):
        done = subprocess.run([sys.executable, "-c", code, str(path), patience], capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_a_moving_picture_stays_small(recorded: Run):
    data = render(entries()["preact_animation"].draw(recorded, Options()), "preact_animation", "gif")
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 29
    assert len(data) < 5_000_000


@pytest.mark.slow
def test_train_py_draws_when_it_is_done(tmp_path: Path, root: Path):
    command = [sys.executable, str(root / "train.py"), *TINY, f"out={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "figures" / "loss.png").exists()


def test_nothing_of_pyplot_is_used(root: Path):
    """Its figures would live on in a global list, and it would choose a window system."""
    sources = (root / "src" / "ffnlab" / "analysis").rglob("*.py")
    assert not [path for path in sources if "pyplot" in path.read_text(encoding="utf-8")]


def test_a_picture_is_empty_once_it_is_written(tmp_path: Path):
    picture = Figure()
    picture.subplots()
    pictures.write(Drawing(picture, "A caption."), "one", tmp_path)
    assert picture.axes == []
