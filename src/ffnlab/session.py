"""The parts of a run, ready to compute: model, data, optimizer, probes on their device."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ffnlab import build
from ffnlab.config import settings
from ffnlab.data import Dataset, cache_dir
from ffnlab.device import autocast, choose_device, choose_precision
from ffnlab.evaluate import bits_per_byte, evaluate
from ffnlab.nn.gpt import GPT, run_block_checkpointed
from ffnlab.probe import Observer
from ffnlab.record.checkpoint import CheckpointSettings
from ffnlab.train import Progress, Row, TrainConfig


class Session:
    """The parts of a run, built from its configuration and put on their device."""

    def __init__(self, cfg: Mapping[str, Any]):
        self.cfg = cfg
        self.train = settings(TrainConfig, cfg["train"], "train")
        self.checkpoint = settings(CheckpointSettings, cfg["checkpoint"], "checkpoint")
        self.probe = build.probe_settings(cfg)
        self.device = choose_device(self.train.device)
        self.precision = choose_precision(self.train.precision, self.device)
        self.autocast = autocast(self.device, self.precision)
        self.data: Dataset = build.dataset(cfg, cache_dir(), progress_line())
        self.model: GPT = build.model(cfg, self.data.vocab_size).to(self.device)
        if self.train.checkpoint_activations:
            self.model.run_block = run_block_checkpointed
        self.optimizer = build.optimizer(cfg, self.model)
        self.schedule = build.schedule(cfg)
        self.begin = build.regulariser(cfg, self.model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.loss = torch.compile(self.model.loss) if self.train.compile else self.model.loss
        self.sink = build.logger(cfg)
        scan = self.data.scan_tokens(self.probe.scan_tokens) if self.probe.scan_tokens else None
        self.observer = Observer(
            self.model,
            build.probes(cfg),
            self.probe,
            steps=self.train.steps,
            batch=self.data.probe_tokens(self.probe.tokens),
            scan=scan,
            autocast=self.autocast,
        )
        self.observer.check_budget(scans=self.train.steps // self.train.eval_every + 2)

    def batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The micro-batches of update `step`, on the device."""
        n, size = self.train.grad_accum, self.train.batch_size
        pairs = (self.data.batch(step, size, micro=m, grad_accum=n) for m in range(n))
        return [(x.to(self.device), y.to(self.device)) for x, y in pairs]

    def validation(self) -> Row:
        """val/loss and, where the text's bytes are known, val/bits_per_byte."""
        row = {
            "val/loss": self.mean_loss(self.data.val_batches(self.train.batch_size, self.train.eval_batches))
        }
        if self.data.bytes_per_token:
            row["val/bits_per_byte"] = bits_per_byte(row["val/loss"], self.data.bytes_per_token)
        return row

    def test(self) -> Row:
        """test/loss on the whole test split (`data.test_frac`), which is read once, when the run is over."""
        return {"test/loss": self.mean_loss(self.data.test_batches(self.train.batch_size, None))}

    def mean_loss(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Nats per token in eval mode."""
        self.model.eval()
        try:
            return evaluate(
                self.loss, ((x.to(self.device), y.to(self.device)) for x, y in batches), self.autocast
            )
        finally:
            self.model.train()

    def state(self, progress: Progress) -> dict[str, Any]:
        """All but the weights that the next update depends on."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "progress": dataclasses.asdict(progress),
        }

    def restore(self, tensors: dict[str, torch.Tensor], trainer: dict[str, Any]) -> Progress:
        """The counterpart of a save."""
        self.model.load_state_dict(tensors, strict=True)
        self.optimizer.load_state_dict(trainer["optimizer"])
        self.scaler.load_state_dict(trainer["scaler"])
        return Progress(**trainer["progress"])


def progress_line() -> Callable[[str, float], None]:
    """Shows how far tokenising is, on a terminal only."""

    def show(what: str, fraction: float) -> None:
        if sys.stderr.isatty():
            print(f"\r{what} {fraction:4.0%}", end="\n" if fraction >= 1 else "", file=sys.stderr, flush=True)

    return show
