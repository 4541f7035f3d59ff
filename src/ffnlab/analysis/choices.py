"""What figures look up in a run: its layers, one telling neuron, the names of tokens, C at a step."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr

from ffnlab.analysis.figures import Missing, Options
from ffnlab.analysis.panels import Curve
from ffnlab.analysis.runs import LAYER, Run
from ffnlab.analysis.style import printable
from ffnlab.errors import UserError


def lacks(what: str, *probes: str) -> Missing:
    """The run did not record `what`; `probes` would have."""
    record = f"probe=[{','.join(('default', *probes))}]" if probes else "probe=default"
    return Missing(f"the run holds no {what}: record it with {record}", record)


def chosen(options: Options, recorded: Sequence[str], missing: Missing) -> list[str]:
    """The layers among `recorded` that the user chose, all without a choice. Raises `missing` for none."""
    if not recorded:
        raise missing
    layers = [layer for layer in recorded if options.layers is None or layer in options.layers]
    if not layers:
        asked = ", ".join(options.layers or ())
        raise Missing(
            f"{missing}; of {asked} nothing is recorded, only {', '.join(recorded)}", missing.record
        )
    return layers


def ends(options: Options, recorded: Sequence[str], missing: Missing) -> list[str]:
    """The layers that the user chose, or the first and the last."""
    layers = chosen(options, recorded, missing)
    return layers if options.layers else list(dict.fromkeys((layers[0], layers[-1])))


def by_layer(run: Run, options: Options, metric: str, missing: Missing) -> dict[str, Curve]:
    """The series of a metric of every layer: metric 'probe/threshold/*/c'."""
    front, _, back = metric.partition("*")
    found = {
        key[len(front) : len(key) - len(back)]: key for key in run.keys(rf"{front}{LAYER.pattern}{back}")
    }
    return {layer: run.series(found[layer]) for layer in chosen(options, sorted(found), missing)}


class Neuron(NamedTuple):
    """A neuron, and how it was chosen."""

    index: int
    how: str


def neuron(run: Run, layer: str, options: Options) -> Neuron:
    """The user's neuron, or a telling one of a layer: the median, by final active fraction on the probe
    batch, of those that are active on some tokens and not on all.
    """
    if f"{layer}/activity" in run.groups:
        last = run.neurons(f"{layer}/activity")["active_frac"][-1]
        final, where = last.values, f"at step {int(last.step)}"
    elif f"{layer}/trace" in run.groups:
        row = trace(run, layer)[-1]
        on = row.values > threshold(run, layer, row.step.values[None])[0]
        final, where = on.mean(axis=0), f"at step {int(row.step)}"
    else:
        raise lacks("active fraction of each neuron, by which one is chosen")
    if options.neuron is not None:
        if not 0 <= options.neuron < len(final):
            raise UserError(f"--neuron {options.neuron}: {layer} has neurons 0 to {len(final) - 1}")
        return Neuron(options.neuron, "as asked for")
    some = np.flatnonzero((final > 0) & (final < 1))
    pool = some if len(some) else np.arange(len(final))
    index = int(pool[np.argsort(final[pool], kind="stable")[len(pool) // 2]])
    among = "active on some tokens, not on all" if len(some) else "of the layer"
    how = f"the median, by active fraction ({final[index]:.2f} {where}), of the {len(pool):,} neurons {among}"
    return Neuron(index, how)


def trace(run: Run, layer: str) -> xr.DataArray:
    """Pre-activations (step, token, neuron) of the probed tokens, lazy."""
    return run.neurons(f"{layer}/trace")["preact"]


def threshold(run: Run, layer: str, steps: np.ndarray, index: int | None = None) -> np.ndarray:
    """C of a layer, or of one of its neurons, at `steps`, between looks in a straight line; 0 without a
    threshold.
    """
    at, values = run.series(f"probe/threshold/{layer}/c")
    if index is not None and f"{layer}/threshold" in run.groups:
        own = run.neurons(f"{layer}/threshold")["c"][:, index]
        at, values = own.step.values, own.values
    return np.interp(steps, at, values) if len(at) else np.zeros(len(steps))


def tokens(run: Run, options: Options, n: int) -> tuple[int, ...] | None:
    """The places in the probe batch of `n` tokens that the user chose."""
    for place in options.tokens or ():
        if not 0 <= place < n:
            raise UserError(f"--token {place}: the probe batch has tokens 0 to {n - 1}")
    return options.tokens


def token_names(run: Run, places: Sequence[int]) -> list[str]:
    """The probed tokens as "' the' 2:117", with validation window and position; by place where that is not
    on record.
    """
    if "probe_batch" not in run.groups:
        return [f"token {place}" for place in places]
    batch = run.neurons("probe_batch").isel(token=list(places))
    ids, windows, positions = (batch[name].values for name in ("token", "window", "position"))
    return [
        f"{token_text(run, int(token))} {window}:{position}"
        for token, window, position in zip(ids, windows, positions, strict=True)
    ]


def token_text(run: Run, token: int) -> str:
    """A token in quotes, so that its spaces are seen; its id where the data has no text."""
    text = run.texts.get(token)
    if text is None:
        return f"#{token}"
    quote = '"' if "'" in text else "'"
    return f"{quote}{printable(text, 16)}{quote}"
