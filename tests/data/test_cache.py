"""Tokenised text on disk: whole or not at all, made once, and noticed when it was changed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ffnlab.cache import cache_dir
from ffnlab.data import load_tokenizer, open_dataset
from ffnlab.data.cache import cached
from ffnlab.data.shards import ShardWriter, dtype_for, open_shards
from ffnlab.data.sources.text import Sotu, Text
from ffnlab.data.tokenizers import BPE, GPT2, Byte
from ffnlab.errors import UserError


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"Line {i} of the text.\n" for i in range(3000)))
    return path


def opened(path: Path, cache: Path, recipe=None, progress=None, **options):
    settings = {"val_frac": 0.1, "test_frac": 0.0, "seq_len": 16, "seed": 0} | options
    return open_dataset(Text(path=str(path)), recipe or Byte(), cache=cache, progress=progress, **settings)


def folder(cache: Path) -> Path:
    (only,) = [path for path in (cache / "tokens").iterdir() if path.is_dir()]
    return only


def test_manifest_and_shards_say_the_truth(text, tmp_path):
    data = opened(text, tmp_path / "c", BPE(vocab_size=300, fit_mb=1.0), test_frac=0.1)
    where = folder(tmp_path / "c")
    manifest = json.loads((where / "manifest.json").read_text())
    assert manifest == data.manifest
    tokenizer = load_tokenizer(where / "tokenizer.json")
    content = text.read_text()
    cuts = {"train": (0.0, 0.8), "test": (0.8, 0.9), "val": (0.9, 1.0)}
    for split, (low, high) in cuts.items():
        part = content[round(low * len(content)) : round(high * len(content))]
        ids = np.fromfile(where / f"{split}-00000.bin", dtype="<u2").tolist()
        assert tokenizer.decode(ids[:-1]) == part
        assert ids[-1] == tokenizer.eot
        entry = manifest["splits"][split]
        assert (entry["tokens"], entry["bytes"], entry["documents"]) == (len(ids), len(part.encode()), 1)
    val = manifest["splits"]["val"]
    assert data.bytes_per_token == val["bytes"] / val["tokens"] == manifest["bytes_per_token"]["val"]
    assert (data.vocab_size, data.n_test) == (300, manifest["splits"]["test"]["tokens"])


def test_tokenised_once_and_progress_is_told(text, tmp_path):
    told: list[tuple[str, float]] = []
    first = opened(text, tmp_path / "c", progress=lambda what, fraction: told.append((what, fraction)))
    assert told[-1][1] == 1.0
    assert all(0 <= fraction <= 1 for _, fraction in told)
    told.clear()
    again = opened(text, tmp_path / "c", progress=lambda what, fraction: told.append((what, fraction)))
    assert not told
    assert again.fingerprint == first.fingerprint
    assert np.array_equal(again.batch(5, 4)[0], first.batch(5, 4)[0])


def test_changed_text_is_tokenised_again(text, tmp_path):
    first = opened(text, tmp_path / "c").fingerprint
    text.write_text(text.read_text() + "more\n")
    assert opened(text, tmp_path / "c").fingerprint != first


def test_merges_are_learnt_from_training_text_only(text, tmp_path):
    held_out = "zq" * 400
    text.write_text("a b c d e f g h\n" * 500 + held_out)
    data = opened(text, tmp_path / "c", BPE(vocab_size=300, fit_mb=1.0))
    assert data.tokenizer is not None
    assert len(data.tokenizer.encode("zq")) == 2


def test_result_does_not_depend_on_the_number_of_cores(text, tmp_path, monkeypatch):
    many = opened(text, tmp_path / "many")
    monkeypatch.setattr("ffnlab.data.split.PIECE", 500)
    monkeypatch.setattr("ffnlab.data.tokenise.PIECE", 500)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(7), raising=False)
    assert opened(text, tmp_path / "few").fingerprint == many.fingerprint


def test_wide_vocabulary_gets_wide_tokens(tmp_path):
    """The trap: numpy casts 70000 to uint16 as 4464 without a word."""
    assert (dtype_for(65536), dtype_for(65537)) == ("<u2", "<u4")
    writer = ShardWriter(tmp_path, "train", dtype_for(70001), shard_tokens=4)
    writer.append(np.array([70000, 1, 2], np.uint32))
    writer.append(np.array([3, 4, 5, 6, 7, 8], np.uint32))
    writer.close()
    assert [shard["tokens"] for shard in writer.shards] == [4, 4, 1]
    assert open_shards(tmp_path, writer.shards, "<u4").read(0, 9).tolist() == [70000, 1, 2, 3, 4, 5, 6, 7, 8]


def test_shard_that_was_changed(text, tmp_path):
    opened(text, tmp_path / "c")
    shard = folder(tmp_path / "c") / "train-00000.bin"
    good = shard.read_bytes()
    for bad in (good[:-1], b"", bytes([good[0] ^ 1]) + good[1:]):
        shard.write_bytes(bad)
        with pytest.raises(
            UserError, match=r"train-00000\.bin was changed after tokenising.*Delete the folder"
        ):
            opened(text, tmp_path / "c")
    shard.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        opened(text, tmp_path / "c")
    shard.write_bytes(good)
    opened(text, tmp_path / "c")


def test_copied_cache_is_hashed_once(text, tmp_path, monkeypatch):
    opened(text, tmp_path / "c")
    where = folder(tmp_path / "c")
    os.utime(where / "train-00000.bin", ns=(1, 1))
    opened(text, tmp_path / "c")
    monkeypatch.setattr("ffnlab.data.shards.hash_file", lambda path: pytest.fail("hashed again"))
    opened(text, tmp_path / "c")


def test_tokenizer_that_was_changed(text, tmp_path):
    opened(text, tmp_path / "c", BPE(vocab_size=300, fit_mb=1.0))
    Byte().fit(()).save(folder(tmp_path / "c") / "tokenizer.json")
    with pytest.raises(UserError, match="was changed after tokenising"):
        opened(text, tmp_path / "c", BPE(vocab_size=300, fit_mb=1.0))


@pytest.mark.parametrize("torn", ["no manifest", "half a manifest", "empty folder"])
def test_torn_cache_is_made_again(torn, text, tmp_path):
    first = opened(text, tmp_path / "c").fingerprint
    where = folder(tmp_path / "c")
    manifest = where / "manifest.json"
    if torn == "half a manifest":
        manifest.write_bytes(manifest.read_bytes()[:100])
    else:
        manifest.unlink()
    if torn == "empty folder":
        shutil.rmtree(where)
        where.mkdir()
    assert opened(text, tmp_path / "c").fingerprint == first


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from ffnlab.data import open_dataset
from ffnlab.data.sources.text import Text
from ffnlab.data.tokenizers import Byte
text, cache, how = sys.argv[1:]
count = 0
def progress(what, fraction):
    global count
    count += "MB" in what
    if how == "wait":
        time.sleep(0.05)
    elif count == int(how):
        os.kill(os.getpid(), signal.SIGKILL)
options = {"val_frac": 0.1, "test_frac": 0.0, "seq_len": 16, "seed": 0, "cache": Path(cache)}
data = open_dataset(Text(path=text), Byte(), progress=progress, **options)
print(data.fingerprint, count)
"""


def start(text: Path, cache: Path, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(text), str(cache), how], stdout=subprocess.PIPE, text=True
    )


def test_killed_while_writing(text, tmp_path):
    text.write_text(text.read_text() * 30)  # several jobs
    process = start(text, tmp_path / "c", "4")
    assert process.wait() == -signal.SIGKILL
    assert list((tmp_path / "c" / "tokens").glob("*.tmp-*/train-00000.bin"))
    data = opened(text, tmp_path / "c")
    assert data.fingerprint == opened(text, tmp_path / "fresh").fingerprint
    assert not list((tmp_path / "c" / "tokens").glob("*.tmp-*"))


def test_two_processes_at_once(text, tmp_path):
    text.write_text(text.read_text() * 10)
    both = [start(text, tmp_path / "c", "wait") for _ in range(2)]
    lines = [process.communicate()[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert lines[0][0] == lines[1][0] == opened(text, tmp_path / "fresh").fingerprint
    assert min(int(count) for _, count in lines) == 0  # one worked, the other waited


FULL = """
import resource, sys
from pathlib import Path
from ffnlab.data import open_dataset
from ffnlab.data.sources.text import Text
from ffnlab.data.tokenizers import Byte
from ffnlab.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    options = {"val_frac": 0.1, "test_frac": 0.0, "seq_len": 16, "seed": 0, "cache": Path(sys.argv[2])}
    open_dataset(Text(path=sys.argv[1]), Byte(), progress=None, **options)
except UserError as error:
    print(error)
"""


def test_disk_that_takes_no_more(text, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(text), str(tmp_path / "c")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cannot write tokenised text" in done.stdout
    assert "FFNLAB_CACHE" in done.stdout
    assert not list((tmp_path / "c" / "tokens").glob("*.tmp-*"))
    assert not done.stderr


def test_cache_folder_that_cannot_be_made(text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write tokenised text"):
        opened(text, tmp_path / "file")


def test_failed_build_leaves_nothing(tmp_path):
    def fail(folder: Path) -> dict:
        (folder / "half").write_text("x")
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        cached(tmp_path / "c", fail, lambda: None)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("FFNLAB_CACHE", "~/own")
    assert cache_dir() == Path.home() / "own"
    monkeypatch.delenv("FFNLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/ffnlab")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "ffnlab"


def test_sotu_with_gpt2_has_the_known_number_of_tokens(tmp_path):
    """249 speeches, 12,185,751 bytes: 2,389,157 GPT-2 tokens with the end marks (counted elsewhere)."""
    data = open_dataset(
        Sotu(), GPT2(), val_frac=0.1, test_frac=0.1, seq_len=256, seed=0, cache=tmp_path, progress=None
    )
    splits = data.manifest["splits"].values()
    assert sum(split["documents"] for split in splits) == 249
    assert sum(split["bytes"] for split in splits) == 12_185_751
    assert data.n_train + data.n_val + data.n_test == 2_389_157
