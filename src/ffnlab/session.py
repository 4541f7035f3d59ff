"""The parts of a run, ready to compute: model, data, optimizer, probes on their device."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch

from ffnlab import build
from ffnlab.cache import cache_dir
from ffnlab.config import settings
from ffnlab.data import Dataset, Tokenizer
from ffnlab.device import DTYPES, autocast, choose_device, choose_precision
from ffnlab.diagnose import diagnose
from ffnlab.errors import UserError
from ffnlab.evaluate import evaluate
from ffnlab.nn.gpt import GPT, run_block_checkpointed
from ffnlab.nn.threshold import calibrate
from ffnlab.probe import Observer
from ffnlab.processes import Processes
from ffnlab.record.checkpoint import CheckpointSettings, load
from ffnlab.record.metrics import plain
from ffnlab.stop import Stop
from ffnlab.train import Hooks, Progress, Rewind, Row, TrainConfig, step_seed
from ffnlab.update import Batch


class Session:
    """The parts of a run, built from its configuration and put on their device.

    `before` is what run.json says when a run is resumed: an `auto` of then stays what it was.
    """

    def __init__(self, cfg: Mapping[str, Any], processes: Processes, before: Mapping[str, Any]):
        self.cfg, self.processes = cfg, processes
        self.train = settings(TrainConfig, cfg["train"], "train")
        self.checkpoint = settings(CheckpointSettings, cfg["checkpoint"], "checkpoint")
        self.probe = build.probe_settings(cfg)
        self.device = choose_device(self.train.device)
        auto = self.train.precision == "auto"
        wish = before.get("precision", "auto") if auto else self.train.precision
        self.precision = choose_precision(wish, self.device)
        self.autocast = autocast(self.device, self.precision)
        self.data: Dataset = build.dataset(cfg, cache_dir(), progress_line())
        self.lengths = token_lengths(self.data.tokenizer)
        self.model: GPT = build.model(cfg, self.data.vocab_size).to(self.device)
        if self.train.checkpoint_activations:
            self.model.run_block = run_block_checkpointed
        self.kernels = build.kernels(cfg, self.model, DTYPES[self.precision])
        self.optimizer = build.optimizer(cfg, self.model)
        self.schedule = build.schedule(cfg)
        self.regularise = build.regulariser(cfg, self.model)
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
        self.windows = self.data.probe_tokens(self.probe.tokens)[0].to(self.device)
        self.recorded: dict[str, Any] = {}  # of the record, as the checkpoint that was restored has it
        self.record_bytes = self.observer.check_budget(scans=self.train.steps // self.train.eval_every + 2)
        self.observer.cost = dict.fromkeys(
            self.observer.cost, 0.0
        )  # sizing the record is not part of the run

    def trained(self) -> dict[str, Any]:
        """What `train` works on."""
        return {
            "loss": self.loss,
            "parameters": list(self.model.parameters()),
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "seed": self.cfg["seed"] + 2**40 * self.processes.rank,  # dropout differs between processes
        }

    def hooks(self, *, stop: Stop, **recording: Any) -> Hooks:
        """What `train` calls; `recording` are the calls in which the process that records differs."""
        return Hooks(
            batches=self.batches,
            schedule=self.schedule,
            precision=self.autocast,
            before_update=self.before_update,
            stop=lambda: self.stopped(stop),
            add_up=self.processes.add_up,
            **recording,
        )

    def stopped(self, stop: Stop) -> bool:
        """Whether any process was asked to stop: all ask together."""
        stop.told = self.processes.highest(stop.signum or 0) or None
        return stop.told is not None

    def begin(self, checkpoint: Path | None) -> Progress:
        """Go on from a checkpoint, or start: thresholds with an `active_frac` are set on the probe batch."""
        if checkpoint is not None:
            return self.restore(*load(checkpoint))
        calibrate(self.model, self.windows)
        return Progress()

    def before_update(self, step: int) -> None:
        """What in the objective and in the way of computing depends on the update."""
        self.regularise(step)
        self.kernels.decide(step, self.windows, self.autocast)

    def measure_kernels(self, known: Mapping[str, Any] | None) -> dict[str, Any]:
        """The crossover table of `ffn.kernel=auto`, as it is known, or timed on batches of this size."""
        return self.kernels.measure(
            known, self.train.batch_size * self.cfg["model"]["seq_len"], self.autocast
        )

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of update `step`, on the device."""
        n, size, these = self.train.grad_accum, self.train.batch_size, self.processes
        part = {"grad_accum": n, "rank": these.rank, "world": these.size}
        pairs = (self.data.batch(step, size, micro=m, **part) for m in range(n))
        return [(x.to(self.device), y.to(self.device)) for x, y in pairs]

    def rewound(self, back: Rewind, before: Progress) -> Progress:
        """Back at the checkpoint before a spike; the batches from there up to the spike are passed over."""
        self.optimizer.zero_grad()
        if self.scaler.is_enabled():
            self.scaler.update()  # forgets the gradients that it has unscaled
        after = self.begin(back.checkpoint)
        after.passed_over = before.passed_over + back.step - after.step
        after.rewinds, after.time_s = before.rewinds + 1, before.time_s
        return after

    def diagnosis(self, step: int, micro: Sequence[Batch]) -> dict[str, Any]:
        """Where numbers that are not finite began, on this process's part of the batch of update `step`."""
        torch.manual_seed(step_seed(self.trained()["seed"], step))  # the same dropout
        try:
            return diagnose(self.model, self.model.loss, micro, self.autocast)
        except Exception as error:  # out of memory, say: it must not hide what it was asked about
            return {"failed": f"{type(error).__name__}: {error}"}

    def validation(self, stop: Stop) -> Row:
        """val/loss and, where the text is known, val/bits_per_byte; `eval_batches` counts batches of one
        update. On a stop, of the part that was done.
        """
        n = self.train.eval_batches
        windows = None if n is None else n * self.train.grad_accum * self.processes.size
        loss, per_byte = self.measured(self.data.val_batches(self.train.batch_size, windows), stop)
        return {"val/loss": loss} | ({} if per_byte is None else {"val/bits_per_byte": per_byte})

    def test(self, stop: Stop) -> Row:
        """test/loss on the whole test split (`data.test_frac`), which is read once, when the run is over."""
        return {"test/loss": self.measured(self.data.test_batches(self.train.batch_size, None), stop)[0]}

    def measured(self, batches: Iterable[Batch], stop: Stop) -> tuple[float, float | None]:
        """Nats per token and bits per byte, in eval mode; of the batches before a stop."""
        mine = islice(batches, self.processes.rank, None, self.processes.size)
        mine = takewhile(lambda _: stop.received is None, mine)
        self.model.eval()
        try:
            here = ((x.to(self.device), y.to(self.device)) for x, y in mine)
            return evaluate(self.loss, here, self.autocast, self.lengths, self.processes.add_up)
        finally:
            self.model.train()

    def state(self, progress: Progress) -> dict[str, Any]:
        """All but the weights that the rest of the run depends on."""
        pending = progress.pending and {key: plain(value) for key, value in progress.pending.items()}
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "progress": dataclasses.asdict(progress) | {"pending": pending},
            "probes": self.observer.state(),
            "kernels": self.kernels.state(),
        }

    def restore(self, tensors: dict[str, torch.Tensor], trainer: dict[str, Any]) -> Progress:
        """The counterpart of a save."""
        try:
            self.model.load_state_dict(tensors, strict=True)
        except RuntimeError as error:
            raise UserError(f"the checkpoint does not fit the model of this configuration: {error}") from None
        self.optimizer.load_state_dict(trainer["optimizer"])
        self.scaler.load_state_dict(trainer["scaler"])
        self.observer.restore(trainer.get("probes", {}))
        self.kernels.restore(trainer.get("kernels", {}))
        self.recorded = trainer.get("record", {})
        return Progress(**trainer["progress"])


def token_lengths(tokenizer: Tokenizer | None) -> torch.Tensor | None:
    """Bytes of text that each token stands for; the end mark stands for none."""
    if tokenizer is None:
        return None
    sizes = [0 if i == tokenizer.eot else len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    return torch.tensor(sizes, dtype=torch.float64)


def progress_line() -> Callable[[str, float], None]:
    """Shows how far tokenising is, on a terminal only."""

    def show(what: str, fraction: float) -> None:
        if sys.stderr.isatty():
            print(
                f"\r\033[K{what} {fraction:4.0%}",
                end="\n" if fraction >= 1 else "",
                file=sys.stderr,
                flush=True,
            )

    return show
