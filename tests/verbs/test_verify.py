"""`ffnlab verify`: a real run is whole; every kind of damage is found, and nothing is changed."""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ffnlab.verbs import verify


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A finished tiny run."""
    out = tmp_path_factory.mktemp("verify") / "run"
    tiny = (
        "model.n_layers=2 model.d_model=16 model.n_heads=2 model.seq_len=16 train.steps=6 train.batch_size=2"
    )
    more = "train.eval_every=3 train.eval_batches=1 checkpoint.every=3 probe.scan_tokens=64 probe.tokens=8"
    words = [*tiny.split(), *more.split(), "data=counting", "tokenizer=byte", "logger=none", f"out={out}"]
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
    "neurons.zarr cannot be read": chunk,
}


def said(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, str]:
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
