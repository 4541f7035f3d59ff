"""Token files, caches, data sets and folders of models from a stranger: nothing runs or leads out."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from ffnlab import build, cli
from ffnlab.cache import cache_dir
from ffnlab.errors import UserError
from ffnlab.foreign import parse_json, plain_name, read_bytes
from ffnlab.record.checkpoint import broken
from ffnlab.record.tensors import load_weights


def tokenised(text: Path, small: tuple[str, ...]) -> Path:
    """The folder of the cache that holds the tokens of a text."""
    before = {*(cache_dir() / "tokens").glob("text-byte-*")}
    build.dataset(build.compose([*small, f"data.path={text}"])[0], cache_dir())
    (made,) = (p for p in {*(cache_dir() / "tokens").glob("text-byte-*")} - before if p.is_dir())
    return made


@pytest.mark.parametrize("name", ["../evil.bin", "/etc/hostname", "a/b.bin", "", ".", None])
def test_a_manifest_of_shards_that_names_another_place(
    name: str | None, small: tuple[str, ...], tmp_path: Path
):
    text = tmp_path / "text.txt"
    text.write_text(f"words of {tmp_path} " * 300)
    folder = tokenised(text, small)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["val"]["shards"][0]["file"] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="no file in it"):
        build.dataset(build.compose([*small, f"data.path={text}"])[0], cache_dir())


def test_a_shard_that_is_a_link_out(small: tuple[str, ...], tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(f"words of {tmp_path} " * 300)
    folder = tokenised(text, small)
    shard = next(folder.glob("val-*.bin"))
    shutil.move(shard, tmp_path / "elsewhere.bin")
    shard.symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(UserError, match="leads out of"):
        build.dataset(build.compose([*small, f"data.path={text}"])[0], cache_dir())


def test_a_pickle_beside_token_files_is_not_opened(
    small: tuple[str, ...], evil: bytes, mark: Path, tmp_path: Path
):
    for name in ("train.bin", "val.bin"):
        np.arange(4000, dtype="<u2").tofile(tmp_path / name)
    (tmp_path / "meta.pkl").write_bytes(evil)
    with pytest.raises(UserError, match=r"meta\.json"):
        build.dataset(
            build.compose([*small[2:], "data=bin", f"data.path={tmp_path}", "tokenizer=char"])[0], cache_dir()
        )
    assert not mark.exists()


@pytest.mark.slow
def test_a_data_set_with_a_script_and_pickles(
    small: tuple[str, ...], evil: bytes, mark: Path, tmp_path: Path
):
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "words.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    (folder / "data.pkl").write_bytes(evil)
    with pytest.raises(UserError, match="cannot load split"):
        build.dataset(
            build.compose([*small[1:], "data=hf", f"data.path={folder}", "data.column=text"])[0], cache_dir()
        )
    assert not mark.exists()


def folder_of_gpt2(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return path


@pytest.mark.parametrize("kind", ["pickle", "upwards", "absolute", "link", "deep"])
def test_a_folder_of_transformers(
    kind: str, evil: bytes, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = folder_of_gpt2(tmp_path / "model")
    (tmp_path / "x.safetensors").write_bytes(safetensors.torch.save({"a": torch.zeros(1)}))
    named = {
        "upwards": "../x.safetensors",
        "absolute": str(tmp_path / "x.safetensors"),
        "link": "x.safetensors",
    }
    if kind == "pickle":
        (path / "pytorch_model.bin").write_bytes(evil)
    elif kind == "deep":
        (path / "config.json").write_text("[" * 100_000)
    else:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": named[kind]}}))
        if kind == "link":
            (path / "x.safetensors").symlink_to(tmp_path / "x.safetensors")
    assert cli.main(["import", "hf", str(path), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    words = {"pickle": "pickles", "link": "leads out of", "deep": "nested more than"}
    assert words.get(kind, "is not the name of a safetensors file") in said
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


def test_weights_that_are_a_pickle(evil: bytes, mark: Path, tmp_path: Path):
    (tmp_path / "w.safetensors").write_bytes(evil)
    with pytest.raises(UserError, match="is not a file of weights"):
        load_weights(tmp_path / "w.safetensors")
    assert not mark.exists()


def test_a_checkpoint_whose_file_is_a_link_out(copied: Callable[[], Path], tmp_path: Path):
    (step,) = (copied() / "checkpoints").glob("step-*")
    assert broken(step) is None
    shutil.move(step / "trainer.pt", tmp_path / "elsewhere")
    (step / "trainer.pt").symlink_to(tmp_path / "elsewhere")
    assert "leads out of" in str(broken(step))


def test_a_link_to_a_whole_run_is_one(copied: Callable[[], Path], tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(copied())
    assert cli.main(["verify", str(link)]) == 0


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "/a", "a\\b", "a\0b", "a\n", "../a", 3, None]
)
def test_what_is_no_plain_name(name: object):
    assert not plain_name(name)


def test_a_file_that_is_too_large_and_one_that_never_ends(tmp_path: Path):
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(UserError, match="has 11 bytes; at most 10 are read"):
        read_bytes(tmp_path / "large", most=10)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is no regular file"):
        read_bytes(tmp_path / "pipe")


@pytest.mark.parametrize(("deep", "read"), [(64, True), (66, False), (900, False), (100_000, False)])
def test_how_deep_json_is_read(deep: int, read: bool):
    text = "[" * deep + "]" * deep
    if read:
        parse_json(text)
    else:
        with pytest.raises(UserError, match="nested more than 64 deep"):
            parse_json(text)
