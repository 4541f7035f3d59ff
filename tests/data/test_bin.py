"""Token files of nanoGPT and llm.c, written here byte by byte."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from ffnlab.data import open_dataset
from ffnlab.data.sources.bin import Bin
from ffnlab.data.tokenizers import BPE, GPT2, Byte
from ffnlab.errors import UserError

TRAINED = BPE(
    vocab_size=2048, fit_mb=64.0
)  # the default choice of the tokenizer group, which token files ignore


def raw(path: Path, tokens, dtype="<u2") -> Path:
    path.write_bytes(np.asarray(tokens, dtype=dtype).tobytes())
    return path


def shard(path: Path, tokens, magic=20240520, version=1, count=None, dtype="<u2") -> Path:
    header = struct.pack("<3i", magic, version, len(tokens) if count is None else count).ljust(1024, b"\0")
    path.write_bytes(header + np.asarray(tokens, dtype=dtype).tobytes())
    return path


def opened(path, cache, vocab_size=None, recipe=TRAINED, val_frac=0.1, test_frac=0.0, dtype=None):
    return open_dataset(
        Bin(path=str(path), vocab_size=vocab_size, dtype=dtype),
        recipe,
        val_frac=val_frac,
        test_frac=test_frac,
        seq_len=4,
        seed=0,
        cache=cache / "cache",
        progress=None,
    )


def val_tokens(data) -> list[int]:
    return [token for x, _ in data.val_batches(1, None) for token in x.flatten().tolist()]


def test_nanogpt_folder(tmp_path):
    raw(tmp_path / "train.bin", range(100))
    raw(tmp_path / "val.bin", range(200, 221))
    data = opened(tmp_path, tmp_path, vocab_size=1000)
    assert (data.n_train, data.n_val, data.vocab_size) == (100, 21, 1000)
    assert data.tokenizer is None
    assert data.bytes_per_token is None
    assert val_tokens(data) == list(range(200, 220))
    x, y = data.batch(1, 8)
    assert (y - x == 1).all()


def test_llmc_shards_are_one_stream(tmp_path):
    """Windows cross the border of two shards; the header is no token; the vocabulary is GPT-2's."""
    shard(tmp_path / "fineweb_train_000001.bin", range(0, 37))
    shard(tmp_path / "fineweb_train_000002.bin", range(37, 80))
    shard(tmp_path / "fineweb_val_000000.bin", [15496, 995, 50256, 15496, 995])
    data = opened(tmp_path / "fineweb_*.bin", tmp_path)
    assert (data.n_train, data.n_val, data.vocab_size) == (80, 5, 50257)
    seen = set()
    for step in range(1, data.windows_per_epoch + 1):
        x, y = data.batch(step, 1)
        assert (y - x == 1).all()
        seen |= set(x.flatten().tolist())
    assert {35, 36, 37, 38} <= seen
    assert data.tokenizer is not None
    assert data.bytes_per_token == pytest.approx(
        22 / 5
    )  # "Hello world" twice; the end mark stands for no text


def test_ids_beyond_uint16(tmp_path):
    """Bare files are uint32 where the vocabulary needs it or data.dtype says so; Llama 3's header says it."""
    tokens = [*range(70_000, 70_050)]
    raw(tmp_path / "bare.bin", tokens, "<u4")
    data = opened(tmp_path / "bare.bin", tmp_path, vocab_size=100_000)
    assert val_tokens(data) == [70_045, 70_046, 70_047, 70_048]
    assert (data.n_train, data.manifest["dtype"]) == (45, "<u4")
    raw(tmp_path / "small.bin", range(50), "<u4")
    assert opened(tmp_path / "small.bin", tmp_path, vocab_size=50, dtype="uint32").n_train == 45
    with pytest.raises(UserError, match=r"every second id is 0.*data\.dtype=uint32"):
        opened(tmp_path / "small.bin", tmp_path, vocab_size=50)
    assert opened(tmp_path / "small.bin", tmp_path, vocab_size=50, dtype="uint16").n_train == 90
    shard(tmp_path / "llama.bin", tokens, magic=20240801, version=7, dtype="<u4")
    llama = opened(tmp_path / "llama.bin", tmp_path)
    assert (llama.vocab_size, llama.tokenizer, val_tokens(llama)) == (128_256, None, val_tokens(data))
    with pytest.raises(UserError, match=r"token id 70000 at position 0.* 60,000 tokens .*at least 70050"):
        opened(tmp_path / "bare.bin", tmp_path, vocab_size=60_000, dtype="uint32")
    with pytest.raises(UserError, match=r"data\.dtype=int8: expected uint16 or uint32"):
        opened(tmp_path / "bare.bin", tmp_path, vocab_size=60_000, dtype="int8")


def test_last_tenth_without_a_val_file(tmp_path):
    raw(tmp_path / "a.bin", range(60))
    raw(tmp_path / "b.bin", range(60, 200))
    data = opened(tmp_path, tmp_path, vocab_size=256)
    assert val_tokens(data) == list(range(180, 196))
    split = opened(tmp_path, tmp_path, vocab_size=256, test_frac=0.2)
    assert val_tokens(split) == val_tokens(data)
    assert (split.n_train, split.n_test) == (140, 40)
    assert next(split.test_batches(1, None))[0][0, 0] == 140


def test_vocabulary_from_meta_json(tmp_path):
    raw(tmp_path / "train.bin", [0, 1, 2] * 20)
    (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": 3, "stoi": {"a": 0, "b": 1, "c": 2}}))
    data = opened(tmp_path, tmp_path)
    assert data.vocab_size == 3
    assert data.tokenizer is not None
    assert data.tokenizer.decode([0, 2]) == "ac"
    assert data.bytes_per_token == 1.0
    (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": 65}))
    assert opened(tmp_path, tmp_path).vocab_size == 65
    for wrong in ("[]", json.dumps({"vocab_size": "65"}), json.dumps({"vocab_size": 3, "stoi": {"a": 5}})):
        (tmp_path / "meta.json").write_text(wrong)
        with pytest.raises(UserError):
            opened(tmp_path, tmp_path)


def test_vocabulary_from_a_tokenizer_that_needs_no_text(tmp_path):
    raw(tmp_path / "train.bin", [104, 105] * 50)
    data = opened(tmp_path, tmp_path, recipe=Byte())
    assert data.vocab_size == 256
    assert data.bytes_per_token == 1.0
    padded = opened(tmp_path, tmp_path, recipe=GPT2(), vocab_size=50304)
    assert padded.vocab_size == 50304
    with pytest.raises(UserError, match="smaller than the 50257 tokens"):
        opened(tmp_path, tmp_path, recipe=GPT2(), vocab_size=50000)


def test_unknown_vocabulary_and_a_pickle(tmp_path):
    raw(tmp_path / "train.bin", range(100))
    with pytest.raises(
        UserError, match=r"tokenizer=gpt2, data\.vocab_size=N, or a file meta\.json"
    ) as caught:
        opened(tmp_path, tmp_path)
    assert "pkl" not in str(caught.value)
    # a pickle that would write a file if it were read
    (tmp_path / "meta.pkl").write_bytes(
        b"cos\nsystem\n(S'touch " + str(tmp_path / "evil").encode() + b"'\ntR."
    )
    with pytest.raises(UserError, match=r"meta\.pkl lies there.*is not read"):
        opened(tmp_path, tmp_path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"\1\0\2"), "3 bytes; expected uint16 tokens.*truncated"),
        (
            lambda path: shard(path, range(100), count=101),
            "header says 101 tokens, the file holds 100. It is trunc",
        ),
        (lambda path: shard(path, range(100), count=99), "header says 99 tokens.*The header lies"),
        (lambda path: shard(path, range(100), count=-1), "The header lies"),
        (lambda path: shard(path, range(100), count=2**31 - 1), "It is truncated"),
        (lambda path: shard(path, [], count=0), "The header lies"),
        (lambda path: shard(path, range(100), version=7), "header version 7; expected 1"),
        (lambda path: path.write_bytes(struct.pack("<3i", 20240520, 1, 5)), "is truncated: 12 bytes"),
        (
            lambda path: raw(path, [*range(50), 1000, *range(50)]),
            r"token id 1000 at position 50.*at least 1001",
        ),
        (lambda path: raw(path, range(3)), "training split has 3 tokens"),
    ],
)
def test_refused_file(make, message, tmp_path):
    make(tmp_path / "train.bin")
    with pytest.raises(UserError, match=message):
        opened(tmp_path, tmp_path, vocab_size=1000 if "1000" in message else 65536)


def test_refused_options(tmp_path):
    for path in (tmp_path / "none", tmp_path / "*.bin", tmp_path, ""):
        with pytest.raises(UserError, match="token files"):
            Bin(path=str(path), vocab_size=None, dtype=None)
    raw(tmp_path / "train.bin", range(100))
    for vocab_size in (0, -5, 2**32 + 1):
        with pytest.raises(UserError, match="vocab_size"):
            Bin(path=str(tmp_path), vocab_size=vocab_size, dtype=None)


def test_finding_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    raw(tmp_path / "train.bin", range(100))
    first = opened(tmp_path, tmp_path, vocab_size=200).fingerprint
    monkeypatch.setattr("ffnlab.data.tokenfile.hash_file", lambda path: pytest.fail("read again"))
    assert opened(tmp_path, tmp_path, vocab_size=200).fingerprint == first
    monkeypatch.undo()
    raw(tmp_path / "train.bin", range(1, 102))
    assert opened(tmp_path, tmp_path, vocab_size=200).fingerprint != first
    raw(tmp_path / "train.bin", range(150, 251))
    with pytest.raises(UserError, match="token id 200 at position 50"):
        opened(tmp_path, tmp_path, vocab_size=200)
