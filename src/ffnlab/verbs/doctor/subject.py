"""What is examined: the model of a configuration at its start, or that of a run at its newest checkpoint."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffnlab import build
from ffnlab.cache import cache_dir
from ffnlab.config import settings
from ffnlab.data import Dataset
from ffnlab.device import autocast, choose_device, choose_precision
from ffnlab.errors import UserError
from ffnlab.nn.gpt import GPT
from ffnlab.nn.threshold import calibrate
from ffnlab.record.checkpoint import load, newest_complete
from ffnlab.record.rundir import read_info
from ffnlab.train import TrainConfig
from ffnlab.trained import place, trusted_config
from ffnlab.validate import validate

BATCH_TOKENS = 2048  # of one batch (one sequence at least): enough to see what a neuron does, and quick


@dataclass
class Subject:
    """A model on its device with what belongs to it. Nothing here changes it: checks train copies of it."""

    cfg: Mapping[str, Any]
    choices: Mapping[str, Any]
    data: Dataset
    model: GPT
    device: torch.device
    precision: str
    step: int  # updates that it has behind it
    optimizer_state: Mapping[str, Any]
    title: str

    @property
    def train(self) -> TrainConfig:
        return settings(TrainConfig, self.cfg["train"], "train")

    @property
    def autocast(self) -> Callable[[], AbstractContextManager]:
        """The context of a forward pass as training makes it."""
        return autocast(self.device, self.precision)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Training sequences of at most BATCH_TOKENS tokens, others for every `number` >= 1."""
        size = max(1, min(self.train.batch_size, BATCH_TOKENS // self.data.seq_len))
        x, y = self.data.batch(self.step + number, size)
        return x.to(self.device), y.to(self.device)

    @contextmanager
    def own_dropout(self) -> Iterator[None]:
        """Random numbers from the run's seed inside, those of before outside."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.cfg["seed"])
            yield


def at_start(overrides: Sequence[str]) -> Subject:
    """The model of a configuration before its first update."""
    cfg, choices = build.compose(overrides)
    validate(cfg)
    data = build.dataset(cfg, cache_dir())
    device = choose_device(cfg["train"]["device"])
    precision = choose_precision(cfg["train"]["precision"], device)
    return subject(cfg, choices, data, build.model(cfg, data.vocab_size), device, precision)


def of_run(path: Path, plugins: Sequence[str] = ()) -> Subject:
    """The model of a run as its newest complete checkpoint has it; as it started where there is none.

    On its device and in its precision, as far as this machine has them.
    """
    cfg, info = trusted_config(path, plugins), read_info(path)
    data = build.dataset(cfg, cache_dir())
    if info.get("data", {}).get("fingerprint", data.fingerprint) != data.fingerprint:
        warnings.warn(f"the data of {path} have changed since it was trained", stacklevel=2)
    device, precision = place(cfg, info)
    model = build.model(cfg, info.get("vocab_size", data.vocab_size))
    checkpoint, choices = newest_complete(path), info.get("choices", {})
    if checkpoint is None:
        found = subject(cfg, choices, data, model, device, precision)
        found.title += " (no checkpoint yet)"
    else:
        tensors, trainer = load(checkpoint)
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise UserError(f"{checkpoint} does not fit the model of this run: {error}") from None
        step = int(checkpoint.name.removeprefix("step-"))
        state = trainer.get("optimizer", {})
        found = subject(cfg, choices, data, model, device, precision, step=step, optimizer_state=state)
    found.title = f"{path.resolve().name}: {found.title}"
    return found


def anew(of: Subject) -> Subject:
    """The same configuration before its first update."""
    model = build.model(of.cfg, of.model.vocab_size)
    return subject(of.cfg, of.choices, of.data, model, of.device, of.precision)


def subject(
    cfg: Mapping[str, Any],
    choices: Mapping[str, Any],
    data: Dataset,
    model: GPT,
    device: torch.device,
    precision: str,
    *,
    step: int = 0,
    optimizer_state: Mapping[str, Any] | None = None,
) -> Subject:
    """Put a model on its device; before the first update its thresholds are placed, as training does it."""
    model.to(device)
    if step == 0:
        calibrate(model, data.probe_tokens(build.probe_settings(cfg).tokens)[0].to(device))
    what = " with ".join(str(choices[group]) for group in ("ffn", "act") if group in choices)
    when = f"after {step} updates" if step else "at initialisation"
    title = (
        f"{what or 'model'}, {model.n_layers} layers x {model.d_model}, {when}, {precision} on {device.type}"
    )
    return Subject(cfg, choices, data, model, device, precision, step, optimizer_state or {}, title)
