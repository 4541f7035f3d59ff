"""The rule that holds documents out."""

from itertools import pairwise

import pytest

from ffnlab.data.sources.text import Sotu
from ffnlab.data.split import Document, check_fractions, split_documents
from ffnlab.errors import UserError


def docs(n: int) -> list[Document]:
    return [Document(f"document {i}") for i in range(n)]


def names(n: int, val_frac: float, test_frac: float) -> list[str]:
    return [split for split, _ in split_documents(docs(n), val_frac, test_frac)]


def test_every_tenth_document():
    split = names(40, 0.1, 0.0)
    assert [i for i, name in enumerate(split) if name == "val"] == [9, 19, 29, 39]
    assert set(split) == {"train", "val"}


@pytest.mark.parametrize(("val_frac", "test_frac"), [(0.1, 0.1), (0.05, 0.2), (0.3, 0.01), (0.001, 0.0)])
def test_shares_are_as_asked(val_frac, test_frac):
    split = names(5000, val_frac, test_frac)
    assert split.count("val") == pytest.approx(5000 * val_frac, abs=1)
    assert split.count("test") == pytest.approx(5000 * test_frac, abs=1)


def test_validation_does_not_depend_on_the_test_split():
    without, with_test = names(500, 0.1, 0.0), names(500, 0.1, 0.15)
    assert [i for i, name in enumerate(without) if name == "val"] == [
        i for i, name in enumerate(with_test) if name == "val"
    ]


def test_one_document_gives_its_end():
    text = "0123456789" * 10
    assert list(split_documents([Document(text)], 0.1, 0.0)) == [("train", text[:90]), ("val", text[90:])]
    assert list(split_documents([Document(text)], 0.1, 0.2)) == [
        ("train", text[:70]),
        ("test", text[70:90]),
        ("val", text[90:]),
    ]


def test_few_documents_give_the_end_of_each():
    assert names(9, 0.1, 0.0) == ["train", "val"] * 9
    assert names(10, 0.1, 0.0) == ["train"] * 9 + ["val"]


def test_splits_of_the_source_are_kept():
    marked = [Document("a"), Document("b"), Document("c", "val"), Document("d", "test")]
    assert [name for name, _ in split_documents(marked, 0.0, 0.0)] == ["train", "train", "val", "test"]


@pytest.mark.parametrize(
    ("val_frac", "test_frac"),
    [(0.0, 0.0), (-0.1, 0.0), (1.0, 0.0), (0.5, 0.5), (0.1, -0.1), (float("nan"), 0.0)],
)
def test_impossible_fractions(val_frac, test_frac):
    with pytest.raises(UserError, match="val_frac"):
        check_fractions(val_frac, test_frac)


def test_sotu_holds_out_all_times():
    """Every tenth speech is held out, from 1790s to 2020s, and always the same ones."""
    first = [text for name, text in split_documents(Sotu().documents(), 0.1, 0.0) if name == "val"]
    again = [text for name, text in split_documents(Sotu().documents(), 0.1, 0.0) if name == "val"]
    assert first == again
    speeches = [document.text for document in Sotu().documents()]
    places = [speeches.index(text) for text in first]
    assert len(places) == 24
    assert {b - a for a, b in pairwise(places)} == {10}
