"""Every verb that takes a run says the same of what is no run: got, expected, what to do, on one line."""

import argparse
import importlib
from pathlib import Path

import pytest

from ffnlab import cli

FURTHER = {"export": ["--to", "hf"]}  # what else they must be given
CONFIG = "seed: 0\n"


def takers() -> list[str]:
    """The verbs with a run directory among their arguments."""
    found = []
    for name, verb in cli.verbs().items():
        parser = argparse.ArgumentParser()
        importlib.import_module(verb.module).add_arguments(parser)
        places = [action for action in parser._actions if not action.option_strings]
        if any("RUN" in str(action.metavar) for action in places):
            found.append(name)
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two runs in outputs/, one with a broken config.yaml, and what is no run."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("first", CONFIG), ("broken", "seed: 0\ntrain: {steps: [1\nmodel: 2\n")):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "config.yaml").write_text(text)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("words")
    return tmp_path


@pytest.mark.parametrize("verb", takers())
def test_what_is_no_run(verb: str, here: Path, capsys: pytest.CaptureFixture[str]):
    said = {
        "outputs/frist": "outputs/frist does not exist (did you mean 'outputs/first'?): expected a run",
        "first": "first does not exist (did you mean 'outputs/first'?): expected a run",
        "zzz": "zzz does not exist (there are outputs/broken, outputs/first): expected a run directory",
        "empty": "empty holds no run (no config.yaml in it or one folder below): expected a run directory",
        "text": "text is a file: expected a run directory",
        "outputs": "outputs is a folder of runs (2): name one of them, such as outputs/broken",
        "outputs/first/config.yaml": "is a file of the run outputs/first: give that",
        "outputs/broken": "config.yaml is not plain YAML, from line 3 on: restore it from a copy",
    }
    if verb in ("compare", "dashboard", "sync"):
        del said["outputs"]  # which they take
    for path, message in said.items():
        assert cli.main([verb, path, *FURTHER.get(verb, [])]) == 1, path
        shown = capsys.readouterr()
        (line,) = [line for line in (shown.out + shown.err).splitlines() if message in line]
        assert "<unicode string>" not in line


def test_the_takers_are_known():
    assert {"ablate", "compare", "doctor", "export", "figures", "report", "sample", "sparsify", "sync"} <= {
        *takers()
    }


def test_a_configuration_that_lacks_what_a_model_is_built_from(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    for verb in ("ablate", "doctor", "export", "sample", "sparsify"):
        assert cli.main([verb, "outputs/first", *FURTHER.get(verb, [])]) == 1
        assert (
            "config.yaml lacks model, train, data, act, ffn, which train.py writes" in capsys.readouterr().err
        )
