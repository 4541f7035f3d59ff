"""What a probe is: the sites that it watches, and the scalars, arrays and histograms that it returns.

A probe matches module names and imports nothing of the model, and the model does not know that it is watched.
A new probe is one file with a `Probe` and one yaml.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor, cat, nn

from ffnlab.errors import UserError

Array = tuple[np.ndarray, tuple[str, ...]]  # values, and a name for each of their axes

ACT = re.compile(r"blocks\.(\d+)\.ffn(\w*)\.(?:.+\.)?act")


class Site(NamedTuple):
    """One place of the forward pass: the first argument or the output of a named module.

    `whole`: captured at every position of the probe batch's windows, not only at the probed ones.
    """

    module: str
    side: Literal["input", "output"]
    whole: bool = False


def layers(names: Iterable[str]) -> dict[str, list[str]]:
    """The activation modules of every FFN layer: `blocks.3.ffn.act` -> {'L03': ['blocks.3.ffn.act']}.

    A second FFN of a block has its role in its label: `blocks.3.ffn_extra.act` -> 'L03_extra'. An FFN of
    several parts (experts) has several modules; its neurons are theirs, one part after the other. An
    activation that wraps another (a threshold C in front) counts once, from outside: its input is the
    pre-activation before C.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        match = ACT.fullmatch(name)
        if match is None:
            continue
        acts = found.setdefault(f"L{int(match[1]):02d}{match[2]}", [])
        if not any(name.startswith(outer + ".") for outer in acts):
            acts.append(name)
    return found


@dataclass(frozen=True)
class Captured:
    """What the watched sites held at the N probed positions, a row each, in the order of the probe batch.

    Of a site that is `whole`, (W, T, width): all positions of its windows, of which `rows` are the probed
    ones when they are counted through; None where no site can be whole.
    """

    tokens: Int[Tensor, " N"]
    values: dict[Site, Float[Tensor, "..."]]
    rows: Int[Tensor, " N"] | None = None

    def neurons(self, acts: list[str], side: Literal["input", "output"]) -> Float[Tensor, "N F"]:
        """Pre-activations ('input') or post-activations ('output') of all neurons of a layer of `layers`."""
        parts = [self.values[Site(act, side)] for act in acts]
        return parts[0] if len(parts) == 1 else cat(parts, dim=1)


@dataclass
class Observation:
    """What was seen at one step: scalars for metrics.jsonl, arrays for neurons.zarr, counts for histograms.

    The part of an array's name before the last '/' names a group that is recorded at the same steps.
    """

    scalars: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    histograms: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def add(self, other: "Observation") -> None:
        """Takes in another observation of the same step."""
        self.scalars.update(other.scalars)
        self.arrays.update(other.arrays)
        self.histograms.update(other.histograms)


class Scanner:
    """Adds up one scan, chunk by chunk; made anew for every scan, so that nothing is left of the last."""

    seq_len: int  # tokens of each window of the scan, known before the first chunk; chunks are whole windows

    def see(self, site: Site, rows: Float[Tensor, "N F"], start: int) -> None:
        """Takes rows of one watched site; row r is position start + r of the flattened scan batch.

        The rows are only lent: the model goes on with them after the call.
        """
        raise NotImplementedError

    def result(self) -> Observation:
        """What the whole scan showed."""
        raise NotImplementedError


class Probe:
    """Reads something off the model at every `every`-th step (percent of the step under the log schedule)."""

    wants_gradients: ClassVar[bool] = False  # where it is true, `on_gradients` comes before `read`

    def __init__(self, *, every: int):
        if every < 1:
            name = re.sub(r"(?<=.)(?=[A-Z])", "_", type(self).__name__).lower()  # TopTokens: top_tokens
            raise UserError(f"probe.{name}.every is {every}; expected at least 1.")
        self.every = every

    def watch(self, names: list[str]) -> list[Site]:
        """The sites to capture, out of the model's module names; called once, before everything else."""
        return []

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        """What the probe batch and the parameters show now. Only reads."""
        return Observation()

    def on_gradients(self, model: nn.Module) -> None:
        """The gradients of an update at which the probe is due: summed over micro-batches and processes,
        before clipping. Step 0 has none. Only reads.
        """

    def fixed(self) -> dict[str, Array]:
        """Arrays that stay the same over the run, by their names in the record; asked after `watch`."""
        return {}

    def state(self) -> dict[str, Any]:
        """What the probe remembers from one look to the next, in plain tensors: it goes into checkpoints."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """The counterpart of `state`; an empty one is that of a probe that has not looked yet."""

    def scanner(self, model: nn.Module) -> tuple[list[Site], Scanner] | None:
        """The sites to see on the scan and what adds them up; None: this probe has no use for the scan."""
        return None


def thresholds(model: nn.Module, acts: list[str]) -> list[Tensor]:
    """C of the activations of a layer that have one: of shape (), or (F,) where each neuron has its own."""
    found = [getattr(model.get_submodule(act), "threshold", None) for act in acts]
    return [c.detach() for c in found if isinstance(c, Tensor)]


def share(where: np.ndarray) -> float:
    """The fraction of truth values that are true."""
    return int(np.count_nonzero(where)) / where.size


def to_numpy(values: Tensor) -> np.ndarray:
    """A detached fp32 copy on the host."""
    return values.detach().float().cpu().numpy()
