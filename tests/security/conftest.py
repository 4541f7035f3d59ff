"""A run that is whole, copies of it to spoil, and payloads that leave a mark when they run."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ffnlab import build
from ffnlab.cache import cache_dir
from ffnlab.record.checkpoint import save
from ffnlab.record.metrics import Metrics
from ffnlab.record.neurons import NeuronRecord

SMALL = (
    "data=text",
    "tokenizer=byte",
    "ffn=mlp",
    "act=relu",
    "model.n_layers=1",
    "model.d_model=32",
    "model.n_heads=2",
    "model.seq_len=16",
    "model.softcap=null",
    "attention.qk_norm=false",
    "train.steps=2",
    "train.batch_size=2",
    "train.device=cpu",
    "train.precision=fp32",
    "train.threads=1",
    "checkpoint.every=1",
    "probe=activity",
    "probe.tokens=32",
    "probe.scan_tokens=64",
    "logger=none",
)


class Payload:
    """What a pickle of it does when it is loaded: make a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that appears when a payload runs."""
    return tmp_path / "mark"


@pytest.fixture
def evil(mark: Path) -> bytes:
    """A pickle that leaves the mark."""
    return pickle.dumps(Payload(mark))


def write_whole(path: Path, text: Path) -> Path:
    """A run of two steps as train.py leaves it, of an untrained model, with a record of one layer."""
    cfg, choices = build.compose([*SMALL, f"data.path={text}", f"out={path}"])
    data = build.dataset(cfg, cache_dir())
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(cfg, sort_keys=False))
    info = {"id": "0123abcd", "name": path.name, "status": "done", "vocab_size": 256, "choices": choices}
    info |= {"choices": {k: v for k, v in choices.items() if "/" not in k}, "final": {"step": 2}}
    (path / "run.json").write_text(json.dumps(info))
    metrics, record = Metrics(path / "metrics.jsonl"), NeuronRecord(path / "neurons.zarr", 1.0)
    for step in range(3):
        row = {"step": step, "train/loss": 3.0 - step, "probe/activity/L00/active_frac": 0.5}
        metrics.append(row | {"val/loss": 3.0 - step})
        record.add(step, "L00/activity/active_frac", np.full(4, 0.5, np.float32), ("neuron",))
    metrics.close()
    record.flush()
    save(path, 2, build.model(cfg, data.vocab_size).state_dict(), {}, keep_last=1)
    assert data.tokenizer is not None
    data.tokenizer.save(path / "tokenizer.json")
    (path / "tokens.json").write_text(json.dumps({"seq_len": 16, "text": {"65": "A"}}))
    return path


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train on."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return file


@pytest.fixture
def small() -> tuple[str, ...]:
    """The overrides of a run of two steps."""
    return SMALL


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A whole run; nobody writes into it."""
    return write_whole(tmp_path_factory.mktemp("whole") / "run", text)


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Callable[[], Path]:
    """Gives a copy of the whole run."""

    def copy() -> Path:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return Path(shutil.copytree(whole, tmp_path / "run"))

    return copy
