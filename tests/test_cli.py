"""The console script: verbs are found, not imported; what goes wrong is one message and an exit code."""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ffnlab import cli
from ffnlab.errors import UserError

FAKE = '''"""Say what it is told.

A second paragraph, for its own help."""
from ffnlab.errors import UserError


def add_arguments(parser):
    parser.add_argument("do")
    parser.add_argument("overrides", nargs="*")


def run(args):
    if args.do == "user":
        raise UserError("a", "b")
    if args.do == "bug":
        raise TypeError("two\\nlines")
    if args.do == "stop":
        raise KeyboardInterrupt
    if args.do == "compose":
        from ffnlab.config import compose
        compose(args.overrides)
    print("done", args.do)
    return 0
'''


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A verb `echo` beside the real ones."""
    import ffnlab.verbs

    (tmp_path / "echo.py").write_text(FAKE)
    monkeypatch.setattr(ffnlab.verbs, "__path__", [*ffnlab.verbs.__path__, str(tmp_path)])
    found = {"echo": cli.Verb("ffnlab.verbs.echo", "Say what it is told."), "sample": cli.Verb("", "")}
    monkeypatch.setattr(cli, "verbs", lambda: found)
    yield
    sys.modules.pop("ffnlab.verbs.echo", None)


def test_every_verb_is_listed_with_a_line_of_help_and_keeps_the_contract(root: Path):
    found = cli.verbs()
    assert {"sample", "summary", "bench", "import", "export"} <= set(found)
    for name, verb in found.items():
        assert verb.help.endswith("."), f"{name} has no sentence of help"
        place = root / "src" / verb.module.replace(".", "/")
        file = place.with_suffix(".py")
        source = (file if file.exists() else place / "__init__.py").read_text()
        assert "def add_arguments(parser" in source
        assert "def run(args" in source


def test_help_imports_nothing_slow(root: Path):
    code = "import sys\nfrom ffnlab.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'hydra', 'wandb') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "summary" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["echo", "x"], 0, ""),
        (["echo", "user"], 1, "ffnlab echo: 2 problems\n  - a\n  - b\n"),
        (
            ["echo", "bug"],
            1,
            "ffnlab echo: internal error: TypeError: two lines (HYDRA_FULL_ERROR=1 shows where)\n",
        ),
        (["echo", "stop"], 130, "ffnlab echo: interrupted\n"),
        (
            ["echo", "compose", "ffn=swigl"],
            1,
            "ffnlab echo: ffn=swigl: unknown ffn 'swigl'. Did you mean 'swiglu'?",
        ),
        (["echo", "compose", "lr=1", "act"], 1, "ffnlab echo: 2 problems"),
        (["echo", "compose", "ffn=swiglu"], 0, ""),
    ],
)
@pytest.mark.usefixtures("echo")
def test_what_comes_out_is_a_message_and_a_code(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(arguments) == code
    shown = capsys.readouterr()
    assert shown.err.startswith(said)
    assert bool(shown.err) == bool(said)
    assert ("done" in shown.out) == (code == 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "VERB"),
        (["eco"], "Did you mean 'echo'?"),
        (["echo"], "required: do"),
        (["echo", "x", "--y"], "--y"),
    ],
)
@pytest.mark.usefixtures("echo")
def test_wrong_usage_is_exit_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_verb_may_have_the_name_of_a_keyword(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["import", "hf", "/nowhere"]) == 1
    assert capsys.readouterr().err.startswith("ffnlab import: /nowhere is no folder")


@pytest.mark.usefixtures("echo")
def test_a_verbs_help_is_its_docstring(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        cli.main(["echo", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ffnlab echo")
    assert "A second paragraph" in shown


def test_other_errors_with_overrides_that_are_fine_pass_through():
    def run(args: argparse.Namespace) -> int:
        raise UserError("the data is not there")

    with pytest.raises(UserError, match="the data is not there"):
        cli.explaining(run, argparse.Namespace(overrides=["ffn=swiglu"]))
