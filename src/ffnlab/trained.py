"""A run's model and data, opened again to be asked something: nothing of the run is changed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffnlab import build
from ffnlab.cache import cache_dir
from ffnlab.data import Dataset
from ffnlab.device import autocast, choose_device, choose_precision, has_bf16
from ffnlab.errors import UserError
from ffnlab.nn.gpt import GPT
from ffnlab.record.checkpoint import load, newest_complete
from ffnlab.record.rundir import load_config, read_info

WINDOWS_AT_ONCE = 4  # few: the standard error of a mean over batches needs many of them


def whole_config(path: Path) -> dict[str, Any]:
    """The configuration of a run. UserError where it lacks what every run of train.py has."""
    cfg = load_config(path)
    if lacking := [key for key in ("model", "train", "data", "act", "ffn") if key not in cfg]:
        raise UserError(
            f"{path / 'config.yaml'} lacks {', '.join(lacking)}, which train.py writes for every run: "
            "restore it from a copy, or train anew with another out=..."
        )
    return cfg


def trusted_config(path: Path, plugins: Sequence[str]) -> dict[str, Any]:
    """The configuration of a run. UserError where it uses code of packages that were not named."""
    cfg = whole_config(path)
    if cfg.get("plugins") and sorted(cfg["plugins"]) != sorted(plugins):
        raise UserError(
            f"{path} was trained with code of the packages {', '.join(cfg['plugins'])}; if you trust them: "
            f"--plugins {' '.join(cfg['plugins'])}"
        )
    return cfg


def trained_model(path: Path, cfg: dict[str, Any], vocab_size: int) -> GPT:
    """The model as the newest complete checkpoint has it, in eval mode."""
    tensors = newest_weights(path)
    model = build.model(cfg, read_info(path).get("vocab_size", vocab_size))
    model.load_state_dict(tensors)
    return model.eval()


def newest_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a run's newest complete checkpoint."""
    checkpoint = newest_complete(path)
    if checkpoint is None:
        raise UserError(
            f"{path} holds no complete checkpoint yet (the first one comes after checkpoint.every steps)"
        )
    return load(checkpoint)[0]


def place(cfg: Mapping[str, Any], info: Mapping[str, Any]) -> tuple[torch.device, str]:
    """The device and the precision of a run, or what comes next where this machine lacks them: a run of a GPU
    can be opened on a laptop.
    """
    try:
        device = choose_device(cfg["train"]["device"])
    except UserError:
        device = choose_device("auto")
    given = cfg["train"]["precision"]
    wish = info.get("precision", given) if given == "auto" else given
    return device, "fp32" if wish == "bf16" and not has_bf16(device) else choose_precision(wish, device)


class Trained:
    """A trained model with its validation data, on their device, in the precision of the run."""

    def __init__(self, path: Path, plugins: Sequence[str] = ()):
        self.path = path
        self.cfg = trusted_config(path, plugins)
        info = read_info(path)
        if "imported_from" in info and not (path / "tokenizer.json").is_file():
            raise UserError(
                f"{path} was imported without a tokenizer: which text its token ids stand for is not known"
            )
        self.data: Dataset = build.dataset(self.cfg, cache_dir())
        known = info.get("data", {}).get("fingerprint")
        if known not in (None, self.data.fingerprint):
            raise UserError(
                f"the data of {path} have changed since it was trained: its losses cannot be compared"
            )
        self.device, precision = place(self.cfg, info)
        self.precision = autocast(self.device, precision)
        self.model = trained_model(path, self.cfg, self.data.vocab_size).to(self.device)

    def batches(self, windows: int) -> list[tuple[Tensor, Tensor]]:
        """About `windows` validation windows (all when there are fewer), evenly spread, on the device, in
        batches of equal size, so that the mean over batches is the mean over tokens; a rest is left out.
        """
        size = min(windows, WINDOWS_AT_ONCE)
        pairs = [*self.data.val_batches(size, -(-windows // size))]
        size = len(pairs[0][0])
        return [(x.to(self.device), y.to(self.device)) for x, y in pairs if len(x) == size]

    @torch.no_grad()
    def losses(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Nats per token of each batch (N,), in float64."""
        means = []
        for x, y in batches:
            with self.precision():
                means.append(self.model.loss(x, y).double().cpu() / (y >= 0).sum().cpu())
        return torch.stack(means)
