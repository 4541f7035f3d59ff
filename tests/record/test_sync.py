"""`ffnlab sync`: one clean W&B run out of a record, offline and on a server of our own."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ffnlab.errors import UserError
from ffnlab.record.metrics import Metrics
from ffnlab.verbs import sync

HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of which two sessions left offline folders."""
    path = tmp_path / "run"
    (path / "wandb/offline-run-20200101_000000-abcd1234").mkdir(parents=True)
    (path / "wandb/offline-run-20200102_000000-abcd1234").mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump({"seed": 3, "study": "noise", "logger": {}}))
    (path / "run.json").write_text(json.dumps({"id": "abcd1234", "name": "r", "status": "done"}))
    metrics = Metrics(path / "metrics.jsonl")
    for step in range(4):
        metrics.append({"step": step, "train/loss": float("nan") if step == 2 else 3.0 - step})
    metrics.close()
    return path


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    sync.add_arguments(parser)
    return sync.run(parser.parse_args(list(argv)))


def test_one_folder_holds_the_whole_record(run: Path, wandb_rows, capsys: pytest.CaptureFixture[str]):
    for _ in range(2):  # again: the same
        assert call(str(run), "--mode", "offline") == 0
        (folder,) = (run / "wandb").glob("offline-run-*")
        rows = wandb_rows(folder)
        assert [row["step"] for row in rows if "train/loss" in row] == [0, 1, 2, 3]
    assert f"4 rows offline in {folder}" in capsys.readouterr().out
    assert call(str(run.parent), "--mode", "offline") == 0  # the folder of a study
    assert f"{run}: 4 rows offline" in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_gets_it(run: Path, tmp_path: Path):
    server = subprocess.Popen(
        [sys.executable, str(HERE / "wandb_server.py")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout
        port = server.stdout.readline().strip()
        env = {**os.environ, "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        env |= {"WANDB_MODE": "online", "HOME": str(tmp_path)}
        env.pop("WANDB_SERVICE", None)  # that of this process: the child would end it with itself
        code = "import sys; from ffnlab.cli import main; sys.exit(main(['sync', sys.argv[1]]))"
        done = subprocess.run(
            [sys.executable, "-c", code, str(run)], env=env, capture_output=True, text=True, timeout=60
        )
    finally:
        server.kill()
    assert done.returncode == 0, done.stderr
    assert "4 rows sent" in done.stdout
    assert len(list((run / "wandb").glob("offline-run-*"))) == 2  # not ours to remove: nothing offline is new


def test_what_cannot_be_synced_is_said(run: Path, tmp_path: Path):
    (run / "run.json").write_text(json.dumps({"id": "a", "name": "r", "status": "running"}))
    with pytest.raises(UserError, match="is running"):
        call(str(run))
    (run / "run.json").unlink()
    with pytest.raises(UserError, match=r"no run\.json"):
        call(str(run))


@pytest.mark.parametrize("linked", ["the picture", "the folder"])
def test_a_picture_from_elsewhere_is_not_sent(run: Path, tmp_path: Path, linked: str):
    """A link in a run that a stranger made would send a file of the user's."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "private.png").write_bytes(b"private")
    if linked == "the folder":
        (run / "figures").symlink_to(elsewhere)
    else:
        (run / "figures").mkdir()
        (run / "figures/private.png").symlink_to(elsewhere / "private.png")
    before = sorted((run / "wandb").rglob("*"))
    with pytest.raises(UserError, match=r"private\.png leads out of"):
        call(str(run), "--mode", "offline")
    assert sorted((run / "wandb").rglob("*")) == before  # nothing was begun


def test_a_copy_that_fails_midway_is_not_called_sent(run: Path, monkeypatch, capsys):
    """T12: the tracker dies while rows are sent."""

    def dying(self: sync.WandbSink, row: dict) -> None:
        raise ConnectionError("the server is away")

    monkeypatch.setattr(sync.WandbSink, "log", dying)
    with pytest.warns(UserWarning, match="the server is away"):
        assert call(str(run), "--mode", "offline") == 1
    out = capsys.readouterr().out
    assert "NOT copied whole" in out
    assert "sent" not in out
