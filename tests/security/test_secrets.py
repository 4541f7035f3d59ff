"""What the environment keeps secret gets into no file of a run, of a sweep or of W&B."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ffnlab import build, withheld
from ffnlab.errors import UserError
from ffnlab.nn.gpt import GPT
from ffnlab.run import run
from ffnlab.session import Session
from ffnlab.train import Diverged

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_markermarkermarkermarker",
    "AWS_SECRET_ACCESS_KEY": "marker/with+slash=and/more",
    "AWS_SESSION_TOKEN": "session-marker-0001",
    "DB_PASSWORD": "marker 'with\" quotes\\",
    "my_credentials": "user:marker-0002",
}
GIVEN = "marker-of-the-command-line"


def leaks(folder: Path, words: list[str]) -> list[str]:
    """Every file below `folder` with one of the words in its bytes or its name."""
    found = []
    for file in sorted(folder.rglob("*")):
        content = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
        content += str(file.relative_to(folder)).encode()
        for word in words:
            spelt = {word, json.dumps(word)[1:-1], repr(word)[1:-1]}
            found += [f"{file}: {word}" for s in spelt if s.encode() in content]
    return found


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_a_sweep_with_wandb_holds_none(
    environment: None, small: tuple[str, ...], text: Path, root: Path, tmp_path: Path
):
    words = [*small, f"data.path={text}", "logger=wandb", "logger.mode=offline", "seed=0"]
    words += [f"+hydra.job.env_set.GIVEN_API_KEY={GIVEN}", "+hydra.launcher.jobs=1"]
    done = subprocess.run(
        [sys.executable, str(root / "train.py"), "-m", *words[:-1]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (record,) = tmp_path.rglob("run-*.wandb")
    assert b"d_model" in record.read_bytes()  # so that its bytes can be searched
    (facts,) = tmp_path.rglob("run.json")
    assert "hydra.job.env_set.GIVEN_API_KEY=$GIVEN_API_KEY" in facts.read_text()
    assert leaks(tmp_path, [*SECRETS.values(), GIVEN]) == []


def test_a_run_that_crashes_holds_none(
    environment: None, small: tuple[str, ...], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["train.py", f"+hydra.x={SECRETS['HF_TOKEN']}"])
    cfg, choices = build.compose([*small, f"data.path={text}", f"out={tmp_path / 'run'}"])

    def broken(*_: Any) -> None:
        raise RuntimeError(f"the server refused {list(SECRETS.values())}")

    monkeypatch.setattr(Session, "batches", broken)
    with pytest.raises(RuntimeError):
        run(cfg, choices)
    assert "$WANDB_API_KEY" in (tmp_path / "run" / "error.txt").read_text()
    assert "$HF_TOKEN" in (tmp_path / "run" / "run.json").read_text()
    assert leaks(tmp_path, list(SECRETS.values())) == []


def test_a_diagnosis_holds_none(
    environment: None, small: tuple[str, ...], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its pass over the batch may fail by any message."""
    secret = SECRETS["DB_PASSWORD"]
    monkeypatch.setattr(Session, "diagnosis", lambda *_: {"failed": f"the server refused {secret}"})
    monkeypatch.setattr(GPT, "loss", lambda model, *_: model.embed.weight.sum() * math.nan)
    cfg, choices = build.compose([*small, f"data.path={text}", f"out={tmp_path / 'run'}"])
    with pytest.raises(Diverged):
        run(cfg, choices)
    (file,) = (tmp_path / "run").glob("diagnosis-*.json")
    assert "refused $DB_PASSWORD" in file.read_text()
    assert leaks(tmp_path, list(SECRETS.values())) == []


def test_a_configuration_with_a_secret_is_refused_without_saying_it(environment: None):
    with pytest.raises(UserError, match=r"value of \$HF_TOKEN") as said:
        build.compose(["data=counting", f"study=x-{SECRETS['HF_TOKEN']}"])
    assert SECRETS["HF_TOKEN"] not in str(said.value)


def test_a_reference_to_the_environment_is_refused(environment: None):
    with pytest.raises(UserError, match="only references to other keys"):
        build.compose(["data=counting", "study=${oc.env:HF_TOKEN}"])


def test_what_is_a_secret():
    found = withheld.secrets(
        {
            "TOKENIZERS_PARALLELISM": "false",
            "MAX_TOKENS": "4096",
            "SSH_KEY_FILE": "/home/me/.ssh/id",
            "MY_API_KEY": "abcdefgh",
            "HOME": "abcdefghij",
        }
    )
    assert found == {"abcdefgh": "MY_API_KEY"}
