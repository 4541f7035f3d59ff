"""A run directory as the probes leave it, out of random walks that drift down, without a model."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401  # with the next two: see tests/conftest.py
import numpy as np
import pytest
import scipy.stats  # noqa: F401
import xarray  # noqa: F401
import yaml

from ffnlab.analysis.runs import Run
from ffnlab.record.metrics import Metrics
from ffnlab.record.neurons import NeuronRecord
from ffnlab.record.table import write_table

C = 0.1  # the threshold of every layer at the start; it rises by as much over the run
ROLES = ("up", "down")
WORDS = (" the", " of", "\n", " $5", "字", " a_b^c", "\x00", "$x$", " nation", "'")
EDGES = np.linspace(-3, 3, 61, dtype=np.float32)


def write_interventions(path: Path, layers: Sequence[str], neurons: int) -> None:
    """What `ffnlab sparsify` and `ffnlab ablate` leave: the rise is 0.1 nats for each halving."""
    columns = ("method", "layer", "kept_frac", "active_frac", "loss", "rise", "rise_se")
    rows = []
    for layer in ("all", *layers):
        for halvings, method in [(0, "none"), *((i, m) for m in ("c", "top_k") for i in (1, 2, 3))]:
            frac = 0.4 * 0.5**halvings
            values = (method, layer, frac, frac, 3 + 0.1 * halvings, 0.1 * halvings, 0.01)
            rows.append(dict(zip(columns, values, strict=True)))
    write_table(path / "sparsify.csv", columns, rows)
    columns = ("what", "layer", "neurons", "loss", "rise", "rise_se", "instead")
    rows = [dict(zip(columns, ("nothing", "all", 0, 3.0, 0.0, 0.0, "mean"), strict=True))]
    for i, layer in enumerate(layers):
        values = ("ffn", layer, neurons, 3.5 + i, 0.5 + i, float("nan"), "mean")
        rows.append(dict(zip(columns, values, strict=True)))
    write_table(path / "ablate.csv", columns, rows)


def write_run(
    path: Path,
    *,
    layers: Sequence[str] = ("L00", "L01", "L02"),
    neurons: int = 48,
    tokens: int = 32,
    steps: int = 60,
    every: int = 5,
    experts: bool = False,
) -> Path:
    """Everything that the contract of the record names, at step 0, every step up to 20 and every `every`-th.

    With `experts`, the second half of the tokens never reaches the first half of the neurons.
    """
    rng = np.random.default_rng(0)
    path.mkdir(parents=True)
    probe = {"tokens": tokens, "scan_tokens": 256, "preact": {"eps": 0.05}}
    (path / "config.yaml").write_text(yaml.safe_dump({"seed": 0, "probe": probe}))
    (path / "run.json").write_text(json.dumps({"status": "done", "id": "0", "name": path.name}))
    texts = {str(i): word for i, word in enumerate(WORDS)}
    write_interventions(path, layers, neurons)
    (path / "tokens.json").write_text(json.dumps({"seq_len": 16, "text": texts}), encoding="utf-8")
    metrics, record = Metrics(path / "metrics.jsonl"), NeuronRecord(path / "neurons.zarr", budget_gib=8)
    pairs = {layer: Pairs(rng, tokens, neurons, experts) for layer in layers}
    for step in range(steps + 1):
        row: dict[str, Any] = {"step": step}
        if step:
            row["train/loss"] = 3 + 4 * np.exp(-step / 15) + 0.1 * rng.standard_normal()
        seen = step <= 20 or step % every == 0 or step == steps
        scanned = step in (0, steps // 2, steps)
        if scanned:
            row["val/loss"] = 3.1 + 4 * np.exp(-step / 15)
        for place, (layer, walk) in enumerate(pairs.items()):
            walk.move(0 if step == 0 else 1 / steps)
            if place in (0, len(layers) - 1):
                record.add(step, f"{layer}/trace/preact", walk.pre.astype(np.float16), ("token", "neuron"))
            if seen:
                arrays, scalars = walk.look(C + C * step / max(steps, 1), step)
                row |= {f"probe/{named(name, layer)}": value for name, value in scalars.items()}
                for name, array in arrays.items():
                    dims = ("bin",) if name == "preact/hist" else ("neuron",)
                    record.add(step, f"{layer}/{name}", array, dims)
            if scanned:
                for name, (array, dims) in walk.scan(rng).items():
                    record.add(step, f"{layer}/{name}", array, dims)
                row[f"probe/activity/{layer}/dead_frac"] = 0.05 + 0.2 * step / max(steps, 1)
                row[f"probe/activity/{layer}/always_on_frac"] = 0.1
        if seen:
            row |= {"probe/gates/skip_01_02/value": 0.5 + step / 1000, "probe/gates/L00/residual_ffn": 1.0}
            for role in ("embed", "head"):
                row |= {f"probe/gradients/{role}/norm": 1.0, f"probe/gradients/{role}/update_ratio": 0.01}
        metrics.append(row)
    fix(record, rng, tokens)
    record.flush()
    metrics.close()
    return path


def named(metric: str, layer: str) -> str:
    """The name of a metric at a layer: '*' is its label, '#' its number."""
    return metric.replace("*", layer).replace("#", str(int(layer[1:3])))


class Pairs:
    """The pre-activations of one layer, and what probes say about them."""

    def __init__(self, rng: np.random.Generator, tokens: int, neurons: int, experts: bool):
        self.rng, self.pre = rng, rng.standard_normal((tokens, neurons), dtype=np.float32) / 2
        self.drift = rng.uniform(0, 2, neurons).astype(np.float32)
        if experts:
            self.pre[tokens // 2 :, : neurons // 2] = np.nan
        self.ever = np.zeros(self.pre.shape, dtype=bool)

    def move(self, part: float) -> None:
        noise = self.rng.standard_normal(self.pre.shape, dtype=np.float32)
        self.pre += np.float32(part**0.5 / 2) * noise - np.float32(part) * self.drift

    def look(self, c: float, step: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        on, known = self.pre > c, self.pre[np.isfinite(self.pre)]
        self.ever |= on
        ones = np.ones(self.pre.shape[1], dtype=np.float32)
        inside = known.clip(EDGES[0], EDGES[-1])
        arrays = {
            "activity/active_frac": on.mean(0, dtype=np.float32),
            "preact/mean": np.nanmean(self.pre, axis=0),
            "preact/sd": np.nanstd(self.pre, axis=0),
            "preact/hist": np.histogram(inside, EDGES)[0].astype(np.int32),
            "crossings/ever_active_frac": self.ever.mean(0, dtype=np.float32),
            "crossings/flips_mean": ones * step / 10,
            "weights/up_norm": 1 + self.drift * step / 100,
            "gradients/up_norm": np.where(on.any(0), self.drift, 0).astype(np.float32),
        }
        scalars = {
            "activity/*/active_frac": float(on.mean()),
            "preact/*/mean": float(known.mean()),
            "preact/*/sd": float(known.std()),
            "preact/*/below_frac": float(((known >= c - 0.05) & (known < c)).mean()),
            "threshold/*/c": c,
            "lambdas/*/x": 1.0,
            "lambdas/*/x0": step / 100,
            "residual/*/rms": 1 + step / 50,
            "residual/*/attn_ratio": 0.3,
            "residual/*/ffn_ratio": 0.5,
            "attention/*/entropy": 3.0,
            "crossings/*/ever_active_frac": float(self.ever.mean()),
            "crossings/*/flips_mean": step / 10,
        }
        scalars["gradients/*/zero_frac"] = 0.01
        for role in ROLES:
            module = f"gradients/blocks.#.ffn.{role}"
            scalars |= {f"{module}/norm": 1 / (step + 1), f"{module}/update_ratio": 0.01 * (step > 0)}
        return arrays, scalars

    def scan(self, rng: np.random.Generator) -> dict[str, tuple[np.ndarray, tuple[str, ...]]]:
        neurons = self.pre.shape[1]
        value = -np.sort(-rng.random((neurons, 4)).astype(np.float16), axis=1)
        position = rng.integers(0, 256, (neurons, 4), dtype=np.int32)
        return {
            "activity_scan/active_frac": ((self.pre > C).mean(0, dtype=np.float32), ("neuron",)),
            "top_tokens/value": (value, ("neuron", "rank")),
            "top_tokens/position": (position, ("neuron", "rank")),
        }


def fix(record: NeuronRecord, rng: np.random.Generator, tokens: int) -> None:
    """The arrays without steps."""
    places = np.arange(tokens, dtype=np.int32)
    arrays = {
        "probe_batch/token": (places % len(WORDS), ("token",)),
        "probe_batch/window": (places % 4, ("token",)),
        "probe_batch/position": (places, ("token",)),
        "scan/token": (rng.integers(0, 12, (16, 16), dtype=np.int32), ("window", "position")),
        "preact/edge": (EDGES, ("edge",)),
    }
    for name, (array, dims) in arrays.items():
        record.fix(name, array, dims)


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """`write_run`, for tests that want a run of their own."""
    return write_run


@pytest.fixture(scope="session")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three layers; nobody writes into it."""
    return write_run(tmp_path_factory.mktemp("runs") / "relu2 $1_s0")


@pytest.fixture
def recorded(run_path: Path) -> Run:
    return Run(run_path)
