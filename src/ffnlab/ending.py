"""How a run ends: what fails then gets a warning, and hides neither the end nor an error on its way."""

import statistics
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ffnlab.cache import cache_dir
from ffnlab.device import DTYPES
from ffnlab.nn.rate import measure, remember
from ffnlab.session import Session
from ffnlab.stop import Stop
from ffnlab.train import Row

AtEnd = Callable[[Path], list[Path]]
AT_END_S = 5.0  # patience with the figures at the end of a run


def quietly(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """call(...), an exception of it as a warning: for what must not hide how a run ended."""
    try:
        return call(*args, **options)
    except Exception as error:
        warnings.warn(f"at the end of the run: {type(error).__name__}: {error}", stacklevel=2)
        return None


def in_time(at_end: AtEnd, run: Path, stop: Stop) -> list[Path]:
    """The pictures of `at_end`, or none when it fails, takes longer than AT_END_S or is cut off by a stop."""
    pictures: list[Path] = []
    drawing = threading.Thread(target=lambda: pictures.extend(quietly(at_end, run) or []), daemon=True)
    drawing.start()
    until = time.monotonic() + AT_END_S
    while drawing.is_alive() and stop.received is None and time.monotonic() < until:
        drawing.join(0.05)
    return list(pictures)


def timings(session: Session, rows: Sequence[Row], time_s: float, before: Mapping[str, float]) -> Row:
    """Seconds of all sessions, those of the probes (scans included) together and one by one, the pace."""
    pace = [row["perf/tok_per_s"] for row in rows if "perf/tok_per_s" in row]
    probes = {name: before.get(name, 0.0) + seconds for name, seconds in session.observer.cost.items()}
    found: dict[str, Any] = {
        "total_s": time_s,
        "probe_s": sum(probes.values()),
        "probes": probes,
        "median_tok_per_s": statistics.median(pace) if pace else 0.0,
    }
    return found


def ceiling(session: Session) -> float:
    """The matrix-product rate, measured again: a machine busy at the start measured too little."""
    device, dtype = session.device, DTYPES[session.precision]
    return remember(cache_dir(), device, dtype, measure(device, dtype, budget_s=0.1))


def complaints(rows: Sequence[Row]) -> list[str]:
    """What is wrong with a training that came to its end: it learned nothing, or stopped to learn.

    A gradient of exactly 0 up to the end (a dead network: no update changes it any more), or a validation
    loss above that of the untrained model.
    """
    found = []
    norms = [(row["step"], row["optim/grad_norm"]) for row in rows if "optim/grad_norm" in row]
    alive = next((i for i in range(len(norms), 0, -1) if norms[i - 1][1] != 0), 0)
    if alive < len(norms):
        found.append(f"the gradient is exactly 0 from step {norms[alive][0]} on: the network is dead")
    losses = [row["val/loss"] for row in rows if "val/loss" in row]
    if len(losses) > 1 and losses[-1] > losses[0]:
        found.append(f"val/loss ended at {losses[-1]:.4f}, above the {losses[0]:.4f} of the untrained model")
    return [f"{line} (a smaller optim.lr may help)" for line in found]
