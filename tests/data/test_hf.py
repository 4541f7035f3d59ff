"""The datasets library on local files; nothing is fetched."""

import json

import pytest

from ffnlab.data import open_dataset
from ffnlab.data.sources.hf import HuggingFace
from ffnlab.data.tokenizers import Byte
from ffnlab.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def source(**options) -> HuggingFace:
    defaults = dict.fromkeys(
        ("config", "val_split", "test_split", "join", "sample_by", "data_files", "revision", "max_mb")
    )
    return HuggingFace(**({"split": "train", "column": "text", "streaming": False} | defaults | options))


def stories(path, n, word):
    path.write_text(
        "".join(json.dumps({"text": f"{word} {i}.\r\nIt ends.", "id": i}) + "\n" for i in range(n))
    )
    return str(path)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_are_documents(streaming, tmp_path):
    file = stories(tmp_path / "a.jsonl", 30, "Story")
    rows = source(path="json", data_files=file, streaming=streaming)
    texts = [document.text for document in rows.documents()]
    assert texts == [f"Story {i}.\nIt ends." for i in range(30)]
    data = open_dataset(
        rows, Byte(), val_frac=0.1, test_frac=0.1, seq_len=8, seed=0, cache=tmp_path, progress=None
    )
    assert {name: split["documents"] for name, split in data.manifest["splits"].items()} == {
        "train": 24,
        "val": 3,
        "test": 3,
    }


def test_splits_of_the_data_set(tmp_path):
    files = {
        "train": stories(tmp_path / "a.jsonl", 4, "Train"),
        "validation": stories(tmp_path / "b.jsonl", 3, "Val"),
        "test": stories(tmp_path / "c.jsonl", 2, "Test"),
    }
    rows = source(path="json", data_files=files, val_split="validation", test_split="test", join="\n")
    data = open_dataset(
        rows, Byte(), val_frac=0.1, test_frac=0.0, seq_len=8, seed=0, cache=tmp_path, progress=None
    )
    assert {name: split["documents"] for name, split in data.manifest["splits"].items()} == {
        "train": 1,
        "val": 1,
        "test": 1,
    }
    assert data.tokenizer is not None
    assert data.tokenizer.decode(next(data.val_batches(1, None))[0][0].tolist()) == "Val 0.\nI"


def test_text_file_as_one_document(tmp_path):
    (tmp_path / "t.txt").write_text("One.\n\nTwo.\n")
    rows = source(path="text", data_files=str(tmp_path / "t.txt"), sample_by="document")
    assert [document.text for document in rows.documents()] == ["One.\n\nTwo.\n"]


def test_stops_after_max_mb(tmp_path):
    file = stories(tmp_path / "a.jsonl", 1000, "Story")
    rows = source(path="json", data_files=file, streaming=True, max_mb=0.001)
    assert 40 < len(list(rows.documents())) < 60


def test_changed_local_file_is_another_source(tmp_path):
    file = stories(tmp_path / "a.jsonl", 3, "Story")
    before = source(path="json", data_files=file).describe()
    stories(tmp_path / "a.jsonl", 4, "Story")
    assert source(path="json", data_files=file).describe() != before


def test_refused(tmp_path):
    file = stories(tmp_path / "a.jsonl", 3, "Story")
    latin = tmp_path / "l.txt"
    latin.write_bytes(b"caf\xe9")
    cases = [
        ({"path": "json", "data_files": file, "column": "body"}, "data.column=body.*Its columns: text, id"),
        ({"path": "json", "data_files": file, "column": "id"}, "has int there, expected text"),
        ({"path": "json", "data_files": file, "split": "dev"}, "cannot load split 'dev'"),
        ({"path": "json", "data_files": str(tmp_path / "none.json")}, "cannot load split 'train'"),
        ({"path": "text", "data_files": str(latin)}, "UnicodeDecodeError.*0xe9"),
        ({"path": "nobody/nothing"}, "cannot load.*data=sotu"),
    ]
    for options, message in cases:
        with pytest.raises(UserError, match=message):
            list(source(**options).documents())
    for options, message in (
        ({"path": "pandas", "data_files": "x.pkl"}, "expected one of text, json"),
        ({"path": "json"}, "name the files"),
        ({"path": ""}, "needs the name"),
        ({"path": "a/b", "max_mb": 0.0}, "max_mb=0"),
    ):
        with pytest.raises(UserError, match=message):
            source(**options)
