"""Bytes that nobody wrote: what is read comes back right or is refused with a message, and nothing else."""

import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ffnlab.data import open_dataset
from ffnlab.data.dataset import Dataset
from ffnlab.data.sources.bin import Bin
from ffnlab.data.tokenizers import Byte
from ffnlab.errors import UserError
from ffnlab.record import checkpoint
from ffnlab.record.metrics import Metrics

T = TypeVar("T")
LONGEST = 2000  # characters of one message: a screen


def told(call: Callable[[], T]) -> tuple[T | None, str]:
    """What the call gives, or the message of its refusal, which is no longer than a screen."""
    try:
        return call(), ""
    except UserError as error:
        text = str(error)
    assert 0 < len(text.strip()) < LONGEST
    return None, text


NUMBERS = st.one_of(st.integers(-(2**53), 2**53), st.floats(), st.none())
ROWS = st.lists(st.dictionaries(st.text(min_size=1, max_size=8), NUMBERS, max_size=5), max_size=6)


@given(rows=ROWS, torn=st.integers(1, 30))
def test_rows_come_back_and_a_torn_one_is_left_out(rows: list[dict], torn: int, tmp_path: Path):
    """Any keys and numbers; then the last write cut `torn` bytes before its end."""
    rows = [{k: v for k, v in row.items() if not k.endswith("/nonfinite")} for row in rows]
    rows = [{**row, "step": i} for i, row in enumerate(rows)]
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    metrics = Metrics(path)
    for row in rows:
        metrics.append(row)
    metrics.close()
    assert all(same_row(a, b) for a, b in zip(metrics.read(), rows, strict=True))
    if rows:
        last = path.read_bytes().splitlines(keepends=True)[-1]
        path.write_bytes(path.read_bytes()[: -min(torn, len(last))])
        assert all(same_row(a, b) for a, b in zip(metrics.read(), rows[:-1], strict=True))


def same_row(got: dict, want: dict) -> bool:
    def same(a, b) -> bool:
        return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))

    return got.keys() == want.keys() and all(same(got[key], want[key]) for key in want)


VALUES = st.none() | st.text() | st.floats() | st.lists(st.integers(), max_size=2)
LIKE_ROWS = st.dictionaries(st.sampled_from(["step", "a", "a/nonfinite", ""]), VALUES)
LINE = st.one_of(
    st.binary(max_size=40),
    LIKE_ROWS.map(lambda row: json.dumps(row).encode()),
    st.sampled_from([b"[" * 5000, b'{"step": 1' + b"0" * 5000 + b"}", b'{"step": true}', b"\xff\xfe", b"{}"]),
)


@given(lines=st.lists(LINE, max_size=4))
@example(lines=[b'{"step": 1, "a/nonfinite": "x"}'])
@example(lines=[b'{"step": 1, "a/nonfinite": null}'])
@example(lines=[b'{"step": 1, "a/nonfinite": [1]}'])
def test_lines_that_are_no_rows_are_refused(lines: list[bytes], tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    rows, refusal = told(Metrics(path).read)
    assert all(isinstance(row["step"], int) for row in rows or [])
    assert rows is not None or "metrics.jsonl: line" in refusal


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("run")
    model = {"up.weight": torch.randn(4, 3), "c": torch.tensor(0.5)}
    trainer = {"step": 7, "optim": {"m": torch.randn(4, 3)}, "rng": torch.get_rng_state()}
    checkpoint.save(root, 7, model, trainer, keep_last=None)
    return root


FILES = ("model.safetensors", "trainer.pt", "manifest.json")


@given(data=st.data())
def test_a_changed_checkpoint_is_never_loaded(data: st.DataObject, saved: Path, tmp_path: Path):
    """One file is cut, or a byte of it is another one: whatever it is, the state is refused as broken, unless
    the change left the meaning of the manifest as it was.
    """
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "step-000007"
    file = path / data.draw(st.sampled_from(FILES))
    good = file.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    other = bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    bad = good[:at] + data.draw(st.sampled_from([b"", other]))
    file.write_bytes(bad)
    if file.name == "manifest.json" and meaning(bad) == meaning(good):
        return
    assert "not a complete checkpoint" in told(lambda: checkpoint.load(path))[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert checkpoint.newest_complete(tmp_path) is None


def meaning(manifest: bytes) -> object:
    """What the checks read of a manifest."""
    try:
        found = json.loads(manifest)
        return found["format"], found["step"], found["files"]
    except (ValueError, KeyError, TypeError):
        return None


HEADER_INTS = st.lists(
    st.sampled_from([20240520, 20240801, 1, 2, 7, 0, -1, 2**31 - 1]), min_size=3, max_size=5
)


@settings(max_examples=150)
@given(
    header=st.one_of(st.none(), HEADER_INTS),
    padded=st.booleans(),
    body=st.binary(max_size=400),
    dtype=st.sampled_from([None, "uint16", "uint32"]),
    vocab_size=st.sampled_from([None, 1, 256, 50257, 70000, 2**32]),
    val_frac=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_any_bytes_as_token_files(header, padded, body, dtype, vocab_size, val_frac, tmp_path: Path):
    """Every token that is handed out lies in the vocabulary and in the file; all else is refused."""
    start = b"" if header is None else np.asarray(header, dtype="<i4").tobytes()
    if header is not None and padded:
        start = start.ljust(1024, b"\0")
    file = tmp_path / "tokens" / "train.bin"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(start + body)

    def opened() -> Dataset:
        return open_dataset(
            Bin(path=str(file), vocab_size=vocab_size, dtype=dtype),
            Byte(),
            val_frac=val_frac,
            test_frac=0.0,
            seq_len=4,
            seed=0,
            cache=tmp_path / "cache",
            progress=None,
        )

    data, _ = told(opened)
    if data is None:
        return
    x, y = data.batch(1, 2)
    assert int(min(x.min(), y.min())) >= 0
    assert int(max(x.max(), y.max())) < data.vocab_size
    assert (x[:, 1:] == y[:, :-1]).all()
    for batch, _ in data.val_batches(1, None):
        assert int(batch.max()) < data.vocab_size
