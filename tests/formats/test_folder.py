"""Folders of others: whatever is wrong with one is said, and nothing outside of it is read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ffnlab.errors import UserError
from ffnlab.formats.folder import INDEX, WHOLE, compare, open_folder

A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """config.json and two files of one tensor each, no index yet."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file({"a": A}, path / "1.safetensors")
    save_file({"b": B.to(torch.bfloat16)}, path / "2.safetensors")
    return path


def index(folder: Path, **where: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def test_tensors_come_out_of_several_files_in_fp32(folder: Path) -> None:
    index(folder, a="1.safetensors", b="2.safetensors")
    opened = open_folder(folder)
    assert opened.tensors["b"] == ("2.safetensors", "BF16", (4,))
    loaded = opened.load({"a": "x", "b": "y"})
    assert torch.equal(loaded["x"], A)
    assert torch.equal(loaded["y"], B)
    assert loaded["y"].dtype == torch.float32


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "sub/1.safetensors", "", "1.bin", 3]
)
def test_an_index_that_names_no_file_in_the_folder(folder: Path, file: object) -> None:
    save_file({"a": A}, folder.parent / "x.safetensors")
    index(folder, a=file, b="2.safetensors")
    with pytest.raises(UserError, match="is not the name of a safetensors file in the folder"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"a": "1.safetensors", "b": "3.safetensors"}, r"3\.safetensors is missing"),
        ({"a": "1.safetensors", "b": "1.safetensors"}, "b lies in None"),
        ({"b": "1.safetensors"}, "a lies in 1.safetensors; model.safetensors.index.json says None"),
        ({}, "expected a weight_map"),
    ],
)
def test_an_index_that_is_wrong(folder: Path, where: dict, said: str) -> None:
    index(folder, **where)
    with pytest.raises(UserError, match=said):
        open_folder(folder)


def test_a_file_that_is_cut_off_or_no_safetensors(folder: Path) -> None:
    save_file({"a": A, "b": B}, folder / WHOLE)
    whole = (folder / WHOLE).read_bytes()
    for broken in (whole[:-1], whole[:20], b"", b"\xff" * 200):
        (folder / WHOLE).write_bytes(broken)
        with pytest.raises(UserError, match="is not a whole safetensors file"):
            open_folder(folder)


def test_pickles_are_not_opened(folder: Path) -> None:
    torch.save({"a": A}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin .* can run code"):
        open_folder(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\udcff"])
def test_a_config_that_is_no_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"config\.json"):
        open_folder(folder)


def test_every_tensor_that_differs_is_named(folder: Path) -> None:
    tensors = {"a": A, "b": B.to(torch.int64), "c": B}
    save_file(tensors, folder / WHOLE)
    with pytest.raises(UserError) as error:
        compare(open_folder(folder).tensors, {"a": (3, 2), "b": (4,), "d": (1,)})
    assert error.value.problems == [
        "a has shape [2, 3]; config.json makes it [3, 2]",
        "b is stored as I64; read are F32, BF16, F16",
        "c is not known in this family",
        "d is missing",
    ]
