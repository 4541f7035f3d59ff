"""README tells the truth: its commands run, its tables and links are complete."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL) for line in block.splitlines()
]
# Makes the README's training runs small enough for a test; added behind each command as it is printed.
SHRINK = [
    "train.steps=2",
    "train.eval_every=2",
    "train.eval_batches=1",
    "train.batch_size=2",
    "model.d_model=32",
]
SHRINK += ["model.n_heads=2", "model.seq_len=32", "tokenizer.vocab_size=300", "probe.tokens=16"]
SHRINK += ["probe.scan_tokens=256"]
SHOWS = {"--help", "--cfg"}  # prints, and trains nothing


def run(command: str, cwd: Path) -> str:
    """Runs a line of the README in another folder, so that outputs/ lies there; returns what it printed."""
    words = shlex.split(command)
    if words[0] == "make":  # the environment exists already: what counts is the target and what it would run
        words = ["make", "--no-print-directory", "-n", "-C", str(ROOT), *words[1:]]
    elif words[:2] == ["python", "train.py"]:
        words = [sys.executable, str(ROOT / "train.py"), *words[2:]]
        words += [] if SHOWS & set(words) else SHRINK
    elif words[0] == "ffnlab":
        words = [str(Path(sys.executable).with_name("ffnlab")), *words[1:]]
        words += ["--rounds", "1", *SHRINK] if words[1:2] == ["bench"] else []
    elif words[0] == "source":
        assert words[1] == ".venv/bin/activate"
        return ""
    else:
        pytest.fail(f"README has a command that this test does not know: {command}")
    env = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def light(command: str) -> bool:
    """Whether a command neither trains nor needs a run that another one made."""
    return command.startswith(("make", "source", "ffnlab summary")) or bool(SHOWS & set(command.split()))


@pytest.mark.parametrize("command", [command for command in COMMANDS if light(command)])
def test_light_commands_run(command: str, tmp_path: Path) -> None:
    run(command, tmp_path)


@pytest.mark.slow
def test_commands_that_train_run_in_their_order(tmp_path: Path) -> None:
    said = {command: run(command, tmp_path) for command in COMMANDS if not light(command)}
    assert len(said) >= 4
    assert (tmp_path / "outputs" / "first" / "metrics.jsonl").is_file()
    assert next(text for command, text in said.items() if "sample" in command).startswith("My fellow")


@pytest.mark.slow
def test_make_train_runs_what_the_readme_says(tmp_path: Path) -> None:
    promised = "python train.py arch=speedrun threshold=learned"
    assert f"runs `{promised}`" in README
    assert promised in run("make train", tmp_path)
    run(f"{promised} out=outputs/train", tmp_path)
    assert (tmp_path / "outputs" / "train" / "run.json").is_file()


def test_table_of_choices_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`.*) \|$", README, flags=re.MULTILINE)
    shown = {group: set(re.findall(r"`(\w+)`", choices)) for group, choices in rows}
    there: dict[str, set[str]] = {}
    for path in (ROOT / "configs").glob("*/*.yaml"):
        there.setdefault(path.parent.name, set()).add(path.stem)
    bundled = {"arch_act"}  # chosen by arch= only
    assert {group: choices for group, choices in shown.items() if group in there} == {
        group: choices for group, choices in there.items() if group not in bundled
    }


def test_defaults_in_the_table_are_those_of_train_yaml() -> None:
    from ffnlab import build

    _, choices = build.compose([])
    for group, default in re.findall(r"^\| `(\w+)` \|.*?`(\w+)` \(default\)", README, flags=re.MULTILINE):
        assert choices[group] == default


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/sweeps.md"])
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"\]\(([\w./-]+)\)", text) + re.findall(r"`((?:configs|tests|src)/[\w./-]+)`", text)
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def test_targets_that_are_named_exist() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = set(re.findall(r"^  make ([\w-]+)", listed, flags=re.MULTILINE))
    assert {"setup", "train", "test", "check", "lint", "types", "bench", "clean"} <= targets
    assert set(re.findall(r"`make ([\w-]+)", README)) <= targets
