"""Command lines that nobody wrote: parts drawn together train or are refused; wrong values are refused on one
screen.
"""

import argparse
import math
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ffnlab import build, cli
from ffnlab.config import config_dir
from ffnlab.errors import UserError, report
from ffnlab.record.metrics import Metrics
from ffnlab.run import run
from ffnlab.validate import validate

TINY = [
    "model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", "data=counting",
    "tokenizer=byte", "train.steps=2", "train.batch_size=4", "train.eval_batches=2", "train.eval_every=2",
    "probe.scan_tokens=64", "probe.tokens=16", "logger=none", "train.precision=fp32", "train.threads=1",
]  # fmt: skip
SCREEN = 40  # lines
GROUPS = ("arch", "ffn", "act", "threshold", "norm", "residual", "skip", "attention", "optim", "schedule")
NUMBERS: dict[str, list[Any]] = {
    "ffn.expansion": [1, 2.5, 8],
    "ffn.match": ["params", "flops", "width"],
    "ffn.l1": [0.001],
    "ffn.dropout": [0.1],
    "ffn.share": ["down", "all"],
    "ffn.extra": ["true"],
    "ffn.kernel": ["sparse", "auto"],
    "ffn.expansion_by_layer": ["[1,4]", "[2]"],
    "model.order": ["ffn_attn", "parallel"],
    "model.drop_ffn": ["[0]", "[0,1]"],
    "model.drop_attn": ["[1]"],
    "model.d_model": [12, 20],
    "model.zero_out": ["true", "false"],
    "model.tied": ["true"],
    "residual.scale": [0.8, "learned", "layerscale"],
    "residual.ffn": ["post"],
    "norm@norm_ffn": ["layernorm", "dyt"],
    "attention.n_kv_heads": [1],
    "attention.window": [4],
    "threshold.init": [0.5, -0.5],
    "threshold.scope": ["neuron", "layer"],
    "stream": ["[embed_norm,x0_lambdas]", "[backout,smear]", "[]"],
    "probe": ["[]", "[default,trace,gates]", "[sparsity,weights,coactivation]"],
    "train.grad_accum": [2],
    "train.precision": ["bf16"],
    "train.checkpoint_activations": ["true"],
    "train.on_nonfinite": ["skip"],
    "train.on_spike": ["log", "rewind"],
    "optim.lr": [0.001],
}


def choices(group: str) -> list[str]:
    return sorted(file.stem for file in (config_dir() / group).glob("*.yaml"))


PART = st.one_of(
    st.sampled_from(GROUPS).flatmap(lambda g: st.sampled_from(choices(g)).map(lambda c: f"{g}={c}")),
    st.sampled_from(sorted(NUMBERS)).flatmap(lambda k: st.sampled_from(NUMBERS[k]).map(lambda v: f"{k}={v}")),
)
PARTS = st.lists(PART, min_size=1, max_size=6, unique_by=lambda part: part.partition("=")[0])
seen: Counter[str] = Counter()


def attempt(parts: list[str], out: Path) -> tuple[dict[str, float], BaseException | None]:
    """The final metrics of two updates, or why there are none."""
    try:
        cfg, chosen = build.compose([*TINY, "arch=nanogpt", *parts, f"out={out}"])
        return run(cfg, chosen), None
    except Exception as error:
        return {}, error


def trains_or_says_why(parts: list[str], out: Path) -> None:
    """Two updates that end with a finite loss, or a message before anything is written."""
    final, error = attempt(parts, out)
    seen["trained" if error is None else "refused"] += 1
    if error is None:
        assert math.isfinite(final["val/loss"])
        assert Metrics(out / "metrics.jsonl").read()[-1]["step"] == 2
        return
    assert not out.exists()
    if isinstance(error, UserError):
        assert all(line.strip() for line in error.problems or [""])
    elif not type(error).__module__.startswith(("hydra.", "omegaconf.")):  # those train.py explains
        raise error


@settings(max_examples=6)
@given(parts=PARTS)
def test_parts_drawn_together(parts: list[str], tmp_path_factory: pytest.TempPathFactory):
    trains_or_says_why(parts, tmp_path_factory.mktemp("drawn") / "run")


@pytest.mark.slow
def test_many_parts_drawn_together(tmp_path_factory: pytest.TempPathFactory):
    seen.clear()

    @settings(max_examples=60)
    @given(parts=PARTS)
    def drawn(parts: list[str]) -> None:
        trains_or_says_why(parts, tmp_path_factory.mktemp("drawn") / "run")

    drawn()
    assert seen["trained"] >= 20  # else the table above has gone stale and this tries refusals only


def keys(node: Any, path: str = "") -> list[str]:
    """Every dotted key of a configuration that holds a value."""
    if isinstance(node, dict) and node:
        return [key for name, child in node.items() for key in keys(child, f"{path}.{name}".lstrip("."))]
    return [path]


ODD = """-1 0 1e400 -1e9 nan inf null true '' [] {} [1,2,3] {a:1} x 1.5 99999999999999999999 'a b' ß ../..
/etc/passwd ${seed} ??? [null]"""
WRONG = st.one_of(
    st.sampled_from(shlex.split(ODD, posix=False)),
    st.integers(-(10**6), 10**6).map(str),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(str),
)
KEYS = [key for key in keys(build.compose(TINY)[0]) if not key.startswith(("out", "logger"))]


def checked(overrides: list[str]) -> str:
    """What every command says of a configuration: "" where it stands, else the screen that refuses it."""

    def run(args: argparse.Namespace) -> int:
        cfg, _ = build.compose(args.overrides)
        validate(cfg)
        return 0

    try:
        cli.explaining(run, argparse.Namespace(overrides=[*TINY, *overrides]))
    except UserError as error:
        said = report(error.problems, "ffnlab")
        assert 0 < len(said.splitlines()) <= SCREEN
        return said
    return ""


def is_one_screen(key: str, value: str) -> None:
    """Nothing, or a message that is about what was given."""
    said = checked([f"{key}={value}"])
    assert not said or key.rpartition(".")[2] in said


@settings(max_examples=5)
@example(key="schedule.warmup_frac", value="null")
@example(key="plugins", value="x")
@example(key="attention.bias", value="-1")
@given(key=st.sampled_from(KEYS), value=WRONG)
def test_wrong_values(key: str, value: str):
    is_one_screen(key, value)


@pytest.mark.slow
def test_many_wrong_values():
    @settings(max_examples=50)
    @given(key=st.sampled_from(KEYS), value=WRONG)
    def drawn(key: str, value: str) -> None:
        is_one_screen(key, value)

    drawn()


@settings(max_examples=6)
@given(text=st.text(alphabet="abfn=.,[]{}()'\"\\$+~@:/ 01-", min_size=1, max_size=20))
def test_words_that_are_no_overrides(text: str):
    checked([text])
