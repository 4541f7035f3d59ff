"""Which numbers and names a configuration may hold, key by key."""

import math
from collections.abc import Mapping
from typing import Any

from ffnlab.nn.crossover import KERNELS
from ffnlab.nn.ffn.width import MATCHES
from ffnlab.nn.gpt import ORDERS
from ffnlab.nn.init import SCHEMES
from ffnlab.nn.residual import PLACEMENTS
from ffnlab.nn.share import SHARES

# Key -> (lowest, highest) allowed number; lists are checked element by element, null is left to the types.
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**32 - 1),
    "data.seed": (0, 2**32 - 1),
    "data.val_frac": (0.0001, 0.9),
    "data.test_frac": (0, 0.9),
    "train.steps": (1, 10**9),
    "train.batch_size": (1, 2**16),
    "train.grad_accum": (1, 10**6),
    "train.clip": (1e-12, math.inf),
    "train.threads": (1, 4096),
    "train.log_every": (1, 10**9),
    "train.eval_every": (1, 10**9),
    "train.eval_batches": (1, 10**9),
    "train.max_skips": (0, 10**9),
    "train.max_skips_in_a_row": (0, 10**9),
    "train.spike_window": (4, 10**5),
    "train.spike_sigma": (1, 1e6),
    "model.seq_len": (2, 2**20),
    "model.d_model": (1, 2**16),
    "model.n_layers": (1, 1000),
    "model.n_heads": (1, 10**4),
    "model.softcap": (1e-6, math.inf),
    "model.pad_vocab_to": (1, 2**20),
    "model.dropout": (0, 0.999),
    "ffn.expansion": (0.25, 16),
    "ffn.expansion_by_layer": (0.25, 16),
    "ffn.d_ff": (1, 2**24),
    "ffn.dropout": (0, 0.999),
    "ffn.l1": (0, 1e6),
    "ffn.l1_warmup": (0, 10**9),
    "ffn.n_experts": (1, 10**4),
    "ffn.balance": (0, 1e6),
    "ffn.z_loss": (0, 1e6),
    "optim.lr": (1e-12, 1e6),
    "optim.lr_scale": (0, 1e6),
    "optim.weight_decay": (0, 1e3),
    "optim.momentum": (0, 0.999999),
    "optim.betas": (0, 0.999999),
    "optim.eps": (0, 1),
    "optim.ns_steps": (1, 50),
    "schedule.warmup_frac": (0, 1),
    "schedule.decay_frac": (0, 1),
    "schedule.floor": (0, 1),
    "threshold.init": (-1e6, 1e6),
    "attention.scale": (1e-6, 1e3),
    "attention.rope_base": (1, 1e12),
    "attention.rope_frac": (0, 1),
    "attention.n_kv_heads": (1, 10**4),
    "attention.window": (1, 2**20),
    "norm.eps": (0, 1),
    "norm_ffn.eps": (0, 1),
}
CHOICES: dict[str, tuple[str | None, ...]] = {
    "model.order": tuple(ORDERS),
    "optim.ns_precision": ("auto", "bf16", "fp32", None),
    "model.init": SCHEMES,
    "ffn.match": MATCHES,
    "ffn.share": SHARES,
    "ffn.kernel": KERNELS,
    "residual.attn": tuple(PLACEMENTS),
    "residual.ffn": tuple(PLACEMENTS),
}


def out_of_range(cfg: Mapping[str, Any]) -> list[str]:
    """One line for every number and every name that is not allowed."""
    numbers = [line for path, bounds in RANGES.items() for line in outside(path, find(cfg, path), bounds)]
    return numbers + [
        f"{path}={find(cfg, path)!r}: expected one of {', '.join(filter(None, names))}"
        for path, names in CHOICES.items()
        if find(cfg, path) not in names
    ]


def find(cfg: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where a choice of a group does not have the key."""
    node: Any = cfg
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def outside(path: str, value: Any, bounds: tuple[float, float]) -> list[str]:
    """One line for a number outside the bounds (both included)."""
    if isinstance(value, Mapping):
        return [line for key, item in value.items() for line in outside(f"{path}.{key}", item, bounds)]
    if isinstance(value, list):
        return [line for item in value for line in outside(path, item, bounds)]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or bounds[0] <= value <= bounds[1]
    ):
        return []
    return [f"{path}={value}: expected a number from {bounds[0]:g} to {bounds[1]:g}"]
