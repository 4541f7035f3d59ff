"""When the probes look, and what they see together."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.probe.base import Array, Captured, Observation, Probe, Scanner, Site
from ffnlab.probe.forward import aside, crop, watch

SCAN_CHUNK_TOKENS = 2048  # small enough for a CPU cache: measured best of 512 to 8192


@dataclass(frozen=True)
class ProbeSettings:
    """When and on how much the probes look (the keys of `probe` that are not probes)."""

    every: int  # the default of every probe's own `every`
    every_step_until: int  # every step up to this one, whatever `every` says
    schedule: Literal["every", "log"]  # 'log': gaps of `every` percent of the step
    tokens: int  # probed positions of the probe batch
    scan_tokens: int  # tokens of the scan; 0: no scan
    budget_gib: float  # most that the arrays of the run may take, uncompressed

    def __post_init__(self) -> None:
        """All problems at once, as a `UserError`."""
        problems = [
            f"probe.{name} is {getattr(self, name)}; expected at least {least}."
            for name, least in (("every", 1), ("every_step_until", 0), ("tokens", 1), ("scan_tokens", 0))
            if getattr(self, name) < least
        ]
        if not self.budget_gib > 0:
            problems.append(f"probe.budget_gib is {self.budget_gib}; expected a number above 0.")
        if problems:
            raise UserError(*problems)

    def due(self, step: int, every: int, steps: int) -> bool:
        """Whether a probe with this `every` looks at `step` of `steps` updates: always at 0 and at the end.

        Schedule 'log' puts the looks at the first whole steps at or past (1 + every/100)^k, k = 0, 1, ...:
        the gap is about `every` percent of the step, so that the two schedules are equally dense at step
        100.
        """
        if step in (0, steps) or step <= self.every_step_until:
            return True
        if self.schedule == "every":
            return step % every == 0
        return step == 1 or _power(step, every) > _power(step - 1, every)


def _power(step: int, every: int) -> int:
    """The largest k with (1 + every/100)^k <= step; the small term keeps exact powers exact."""
    return math.floor(math.log(step) / math.log1p(every / 100) + 1e-9)


class Observer:
    """Runs the probes of a model on its probe batch (`observe`) and on the scan (`scan`).

    `batch` is (tokens, mask) with a mark at every probed position; `scan` is None or tokens. `autocast`
    makes the context of the forward passes: pass the one of training, so that what is measured is what is
    trained. `cost` holds the seconds spent so far, by probe, with those of the forward passes under
    'forward'.
    """

    def __init__(
        self,
        model: nn.Module,
        probes: dict[str, Probe],
        settings: ProbeSettings,
        *,
        steps: int,
        batch: tuple[Int[Tensor, "W T"], Bool[Tensor, "W T"]],
        scan: Int[Tensor, "S T"] | None,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.model, self.probes, self.settings = model, probes, settings
        self.steps, self.autocast = steps, autocast
        names = [name for name, _ in model.named_modules()]
        self.sites = {name: probe.watch(names) for name, probe in probes.items()}
        self.cost = {"forward": 0.0} | dict.fromkeys(probes, 0.0)
        device = next(model.parameters()).device
        self.places = batch[1].nonzero()  # (N, 2): window and position of every probed token
        # Experts are full late in a window, behind the probed positions: to count drops it stays whole.
        whole = any(getattr(module, "capacity", None) for module in model.modules())
        tokens, mask = batch if whole else crop(*batch)
        self.tokens, self.rows = tokens.to(device), mask.flatten().nonzero().squeeze(1).to(device)
        self.scan_tokens = None if scan is None or not settings.scan_tokens else scan.to(device)

    @property
    def seconds(self) -> float:
        """Wall-clock spent in the probes so far."""
        return sum(self.cost.values())

    def due(self, step: int) -> bool:
        """Whether any probe looks at this step."""
        return bool(self._due(step))

    def observe(self, step: int) -> Observation:
        """What the probes that are due see on the probe batch after update `step`."""
        return self._observe(self._due(step))

    def scan(self, step: int, check: Callable[[], None] = lambda: None) -> Observation:
        """What the probes see on the scan after update `step`; `check`, before every part, may raise."""
        return self._scan(self.scan_tokens, self.probes, check)

    def on_gradients(self, step: int) -> None:
        """Shows the gradients of update `step` to the probes that are due and want them."""
        for name, probe in self._due(step).items():
            if probe.wants_gradients:
                with self._clock(name), torch.no_grad():
                    probe.on_gradients(self.model)

    def fixed(self) -> dict[str, Array]:
        """Arrays that stay the same over the run: which tokens are probed and scanned, and those of the
        probes.
        """
        if not self.probes:
            return {}
        window, position = self.places.T
        probed = {"token": self.tokens.flatten()[self.rows], "window": window, "position": position}
        found: dict[str, Array] = {f"probe_batch/{key}": (_int32(v), ("token",)) for key, v in probed.items()}
        if self.scan_tokens is not None:
            found["scan/token"] = (_int32(self.scan_tokens), ("window", "position"))
        for probe in self.probes.values():
            found |= probe.fixed()
        return found

    def state(self) -> dict[str, dict[str, Any]]:
        """What the probes remember from look to look, for a checkpoint."""
        return {name: state for name, probe in self.probes.items() if (state := probe.state())}

    def restore(self, state: dict[str, dict[str, Any]]) -> None:
        """The counterpart of `state`."""
        for name, probe in self.probes.items():
            probe.restore(state.get(name, {}))

    def looks(self, name: str) -> set[int]:
        """The steps of the run at which a probe looks; step 0 has no gradients."""
        probe, due = self.probes[name], self.settings.due
        steps = range(int(probe.wants_gradients), self.steps + 1)
        return {step for step in steps if due(step, probe.every, self.steps)}

    def sizes(self, *, scans: int) -> dict[str, int]:
        """Bytes of all arrays of a run with `scans` scans, uncompressed, by probe: looks once, times the
        looks. Leaves the probes as they were.
        """
        state, found = self.state(), {}
        one_window = None if self.scan_tokens is None else self.scan_tokens[:1]
        for name, probe in self.probes.items():
            with torch.no_grad():
                probe.on_gradients(self.model)
            seen, scanned = self._observe({name: probe}), self._scan(one_window, {name: probe})
            found[name] = len(self.looks(name)) * _bytes(seen) + scans * _bytes(scanned)
        self.restore(state)
        return found

    def check_budget(self, *, scans: int) -> int:
        """Bytes of all arrays of the run; a `UserError` when that is above the budget."""
        sizes, budget = self.sizes(scans=scans), self.settings.budget_gib
        total = sum(sizes.values())
        if total > budget * 2**30:
            largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:4]
            raise UserError(
                f"the probes would record {total / 2**30:.3g} GiB; probe.budget_gib is {budget:g}. Raise it, "
                "look less often (probe.every, probe.NAME.every), or take a probe out: "
                + ", ".join(f"{name} {sizes[name] / 2**30:.2g} GiB" for name in largest)
                + "."
            )
        return total

    def _due(self, step: int) -> dict[str, Probe]:
        due, steps = self.settings.due, self.steps
        return {name: probe for name, probe in self.probes.items() if due(step, probe.every, steps)}

    def _observe(self, probes: dict[str, Probe]) -> Observation:
        captured = Captured(self.tokens.flatten()[self.rows], {}, self.rows)
        wanted = {site for name in probes for site in self.sites[name]}
        result = Observation()

        def take(site: Site, values: Float[Tensor, "N F"]) -> None:
            if site.whole:
                captured.values[site] = values.clone().unflatten(0, self.tokens.shape)
            else:
                captured.values[site] = values.index_select(0, self.rows)

        with self._clock("forward"), aside(self.model, self.autocast):
            watch(self.model, self.tokens, wanted, take)
            for name, probe in probes.items():
                with self._clock(name):
                    result.add(probe.read(captured, self.model))
        return result

    def _scan(
        self,
        tokens: Int[Tensor, "S T"] | None,
        probes: dict[str, Probe],
        check: Callable[[], None] = lambda: None,
    ) -> Observation:
        result = Observation()
        scanners: dict[str, Scanner] = {}
        seers: dict[Site, list[str]] = {}
        for name, probe in probes.items():
            if tokens is not None and (scan := probe.scanner(self.model)) is not None:
                sites, scanners[name] = scan
                scanners[name].seq_len = tokens.shape[1]
                for site in sites:
                    seers.setdefault(site, []).append(name)
        if tokens is None or not scanners:
            return result
        windows = max(1, SCAN_CHUNK_TOKENS // tokens.shape[1])
        with self._clock("forward"), aside(self.model, self.autocast):
            for first in range(0, len(tokens), windows):
                check()
                start = first * tokens.shape[1]

                def see(site: Site, rows: Float[Tensor, "N F"], start: int = start) -> None:
                    for name in seers[site]:
                        with self._clock(name):
                            scanners[name].see(site, rows, start)

                watch(self.model, tokens[first : first + windows], set(seers), see)
            for name, scanner in scanners.items():
                with self._clock(name):
                    result.add(scanner.result())
        return result

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        """Charges the time spent inside to `name`, but for what a clock within it charges to another."""
        began, charged = time.perf_counter(), self.seconds
        try:
            yield
        finally:
            self.cost[name] += time.perf_counter() - began - (self.seconds - charged)


def _bytes(seen: Observation) -> int:
    return sum(array.nbytes for array, _ in seen.arrays.values())


def _int32(values: Tensor) -> np.ndarray:
    return values.cpu().numpy().astype(np.int32)
