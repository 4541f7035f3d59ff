"""`ffnlab verify`: a real run is whole; every kind of damage is found, and nothing is changed."""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zarr

from ffnlab.errors import UserError
from ffnlab.verbs import verify


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A finished tiny run."""
    out = tmp_path_factory.mktemp("verify") / "run"
    tiny = (
        "model.n_layers=2 model.d_model=16 model.n_heads=2 model.seq_len=16 train.steps=6 train.batch_size=2"
    )
    more = "train.eval_every=3 train.eval_batches=1 checkpoint.every=3 checkpoint.weights_every=4"
    probed = ["probe.scan_tokens=64", "probe.tokens=8"]
    words = [
        *tiny.split(),
        *more.split(),
        *probed,
        "data=counting",
        "tokenizer=byte",
        "logger=none",
        f"out={out}",
    ]
    subprocess.run([sys.executable, str(root / "train.py"), *words], check=True, capture_output=True)
    return out


def hashes(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.rglob("*")
        if file.is_file()
    }


def edit(file: str, change: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda run: (run / file).write_text(change((run / file).read_text()))


def flip(run: Path) -> None:
    file = run / "checkpoints/step-000006/model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def chunk(run: Path) -> None:
    file = next(f for f in (run / "neurons.zarr/L00/activity/active_frac/c").rglob("*") if f.is_file())
    file.write_bytes(file.read_bytes()[:5])


def array(run: Path, name: str) -> zarr.Array:
    found = zarr.open_group(run / "neurons.zarr", mode="a")[name]
    assert isinstance(found, zarr.Array)
    return found


def shorter(run: Path) -> None:
    """The last step of a layer is gone from all its arrays."""
    for name in ("step", "active_frac"):
        values = array(run, f"L01/activity/{name}")
        values.resize((values.shape[0] - 1, *values.shape[1:]))


def other_run(run: Path) -> None:
    file = run / "checkpoints/step-000003/manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "run": "deadbeef"}))


pytestmark = pytest.mark.slow  # trains a run first

DAMAGES = {
    "no config.yaml": lambda run: (run / "config.yaml").unlink(),
    "run.json is missing": lambda run: (run / "run.json").unlink(),
    "run.json cannot be read": edit("run.json", lambda text: text[:20]),
    "status is 'gone'": edit("run.json", lambda text: json.dumps({**json.loads(text), "status": "gone"})),
    "does not have the sha256": flip,
    "no manifest.json": lambda run: (run / "checkpoints/step-000003/manifest.json").unlink(),
    "no complete checkpoint": lambda run: shutil.rmtree(run / "checkpoints"),
    "metrics.jsonl is missing": lambda run: (run / "metrics.jsonl").unlink(),
    "torn line": edit("metrics.jsonl", lambda text: text + '{"step": 7'),
    "is not a metrics row": edit("metrics.jsonl", lambda text: text.replace("\n", "\nnot json\n", 1)),
    "step 1 follows step 6": edit("metrics.jsonl", lambda text: text + '{"step": 1}\n'),
    "1 steps have no row, the first is 2": edit(
        "metrics.jsonl", lambda text: "".join(x + "\n" for x in text.splitlines() if '"step": 2,' not in x)
    ),
    "ends at step 5, run.json at step 6": edit(
        "metrics.jsonl", lambda text: "".join(x + "\n" for x in text.splitlines() if '"step": 6,' not in x)
    ),
    "step 4 stands there twice": edit(
        "metrics.jsonl",
        lambda text: "".join((x + "\n") * (1 + ('"step": 4,' in x)) for x in text.splitlines()),
    ),
    "step-000003 is of run deadbeef": other_run,
    "is done at step 6, its newest complete checkpoint is of step 3": lambda run: shutil.rmtree(
        run / "checkpoints/step-000006"
    ),
    "weights-000004.safetensors is not a file of weights": lambda run: os.truncate(
        run / "checkpoints/weights-000004.safetensors", 100
    ),
    "neurons.zarr cannot be read": chunk,
    "neurons.zarr is missing": lambda run: shutil.rmtree(run / "neurons.zarr"),
    "L01/activity lacks 1 steps that metrics.jsonl has, the first is 6": shorter,
    "L01/activity: step 2 has a mean active_frac of 0.1250": lambda run: array(
        run, "L01/activity/active_frac"
    ).__setitem__(2, 0.125),
    "L00/activity goes on to step 9, metrics.jsonl ends at 6": lambda run: array(
        run, "L00/activity/step"
    ).__setitem__(-1, 9),
    "L00/activity: its steps do not rise": lambda run: array(run, "L00/activity/step").__setitem__(1, 0),
    "L00/activity/active_frac has 6 rows for 7 steps": lambda run: array(
        run, "L00/activity/active_frac"
    ).resize((6, 64)),
}


def said(capsys: pytest.CaptureFixture[str], *paths: Path | str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    code = verify.run(parser.parse_args([str(path) for path in paths]))
    return code, capsys.readouterr().out


def test_a_finished_run_is_whole(whole: Path, capsys: pytest.CaptureFixture[str]):
    before = hashes(whole)
    assert said(capsys, whole) == (0, f"{whole}: whole\n")
    assert hashes(whole) == before


@pytest.mark.parametrize("words", DAMAGES)
def test_every_kind_of_damage_is_found(
    words: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    DAMAGES[words](run)
    before = hashes(run)
    code, text = said(capsys, whole, run)
    assert code == 1
    assert words in text
    assert text.startswith(f"{whole}: whole\n")
    assert hashes(run) == before


def test_another_run_is_not_the_same(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    assert said(capsys, run, "--same-as", whole) == (0, f"{run}: whole\n")
    array(run, "L00/preact/sd")[2, 3] = 7.0
    code, text = said(capsys, run, "--same-as", whole)
    assert code == 1
    assert "neurons.zarr/L00/preact/sd: 1 of 7 rows differ, the first is row 2" in text
    edit("metrics.jsonl", lambda text: "torn\n" + text)(run)
    assert "is not a metrics row" in said(capsys, run, "--same-as", whole)[1]
    with pytest.raises(UserError, match="none does not exist"):
        said(capsys, run, "--same-as", tmp_path / "none")
