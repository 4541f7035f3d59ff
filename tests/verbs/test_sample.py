"""`ffnlab sample` on a run directory made by hand: a small untrained model, whose noise is exact."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from ffnlab import build
from ffnlab.data.encoders import ByteTokenizer, CharTokenizer, Tokenizer
from ffnlab.errors import UserError
from ffnlab.record.checkpoint import save
from ffnlab.verbs import sample

CHARS = "abcdefghij \n"
Make = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path) -> Make:
    """make_run(tokenizer, *overrides) -> a run directory with one checkpoint, its head not zero."""

    def make(tokenizer: Tokenizer, *overrides: str) -> Path:
        small = (
            "model.n_layers=2",
            "model.d_model=16",
            "model.seq_len=8",
            "model.zero_out=false",
            "logger=none",
        )
        cfg, _ = build.compose([*small, *overrides])
        run = tmp_path / "run"
        run.mkdir()
        (run / "config.yaml").write_text(yaml.safe_dump(cfg))
        tokenizer.save(run / "tokenizer.json")
        model = build.model(cfg, tokenizer.vocab_size)
        save(run, 1, model.state_dict(), {}, keep_last=1)
        return run

    return make


def sampled(capsys, run: Path, *options: str) -> str:
    parser = argparse.ArgumentParser()
    sample.add_arguments(parser)
    assert sample.run(parser.parse_args([str(run), *options])) == 0
    return capsys.readouterr().out


def test_a_seed_fixes_the_text(capsys, make_run):
    run = make_run(CharTokenizer(CHARS, end_mark=False))
    texts = [sampled(capsys, run, "--prompt", "abc", "--tokens", "30", "--seed", seed) for seed in "112"]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("abc")
    assert len(texts[0]) == 3 + 30 + 1  # and a line end


def test_temperature_zero_follows_the_full_forward_pass(capsys, make_run):
    """Each new character is the argmax of the whole model's logits for the last seq_len of the text."""
    tokenizer = CharTokenizer(CHARS, end_mark=False)
    run = make_run(tokenizer)
    text = sampled(capsys, run, "--prompt", "ab", "--tokens", "12", "--temperature", "0")[:-1]
    model, _ = sample.load_run(run)
    ids = tokenizer.encode("ab")
    while len(ids) < 14:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids[-8:]]))[0, -1, : len(CHARS)].argmax()))
    assert text == tokenizer.decode(ids)
    assert text == sampled(capsys, run, "--prompt", "ab", "--tokens", "12", "--top-k", "1")[:-1]


def test_padding_is_never_drawn(make_run):
    """Padding that is likelier than every token (unmasked, its rows of the head made large) stays out."""
    run = make_run(CharTokenizer(CHARS, end_mark=False), "model.mask_padding=false")
    model, _ = sample.load_run(run)
    with torch.no_grad():
        model.head.weight[len(CHARS) :] = 100 * model.head.weight[:1]
    drawn = list(sample.generate(model, [0], 50, temperature=5.0, top_k=None, seed=0))
    assert max(drawn) < len(CHARS)
    assert len(set(drawn)) > 1


def test_a_long_prompt_is_cropped_and_said_so(capsys, make_run):
    run = make_run(CharTokenizer(CHARS, end_mark=False))
    with pytest.warns(UserWarning, match="9 tokens, the model sees 8"):
        long = sampled(capsys, run, "--prompt", "jabcdefgh", "--tokens", "5")
    assert long[1:] == sampled(capsys, run, "--prompt", "abcdefgh", "--tokens", "5")


def test_a_character_is_written_when_its_last_byte_is_there():
    pieces = list(sample.stream(ByteTokenizer(), iter("é€😀x".encode())))
    assert pieces == ["", "é", "", "", "€", "", "", "", "😀", "x", ""]


def test_a_broken_character_does_not_stop_the_text():
    assert "".join(sample.stream(ByteTokenizer(), iter(b"\xf0a\xe2"))) == "\ufffda\ufffd"


def test_without_a_prompt_a_document_begins(capsys, make_run):
    run = make_run(ByteTokenizer())
    assert len(sampled(capsys, run, "--tokens", "3")) > 1


def test_without_prompt_and_end_mark_there_is_no_start(capsys, make_run):
    with pytest.raises(UserError, match="no end mark to start from"):
        sampled(capsys, make_run(CharTokenizer(CHARS, end_mark=False)))


def test_an_unknown_character_is_named(capsys, make_run):
    with pytest.raises(UserError, match=r"character 'Z' \(U\+005A\) at position 2") as error:
        sampled(capsys, make_run(CharTokenizer(CHARS, end_mark=False)), "--prompt", "abZ")
    assert len(error.value.problems) == 1


def test_a_folder_that_is_no_run(capsys, tmp_path):
    with pytest.raises(UserError, match="missing does not exist"):
        sampled(capsys, tmp_path / "missing", "--prompt", "a")


def test_a_run_without_a_checkpoint(capsys, make_run):
    run = make_run(CharTokenizer(CHARS, end_mark=False))
    (run / "checkpoints/step-000001/manifest.json").unlink()
    with pytest.warns(UserWarning, match="broken"), pytest.raises(UserError, match="no complete checkpoint"):
        sampled(capsys, run, "--prompt", "a")


def test_a_run_on_bare_token_ids(capsys, make_run):
    run = make_run(CharTokenizer(CHARS, end_mark=False))
    (run / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        sampled(capsys, run, "--prompt", "a")


def test_numbers_out_of_range_are_all_named(capsys, tmp_path):
    options = ("--tokens", "0", "--temperature", "nan", "--top-k", "0", "--prompt", "a\udcff")
    with pytest.raises(UserError) as error:
        sampled(capsys, tmp_path, *options)
    assert [problem.split()[0] for problem in error.value.problems] == [
        "--prompt",
        "--tokens",
        "--temperature",
        "--top-k",
    ]
