"""Draw the validation loss of a run against its active fraction: fewer neurons, by a higher C, top-k or eps.

Three ways to leave out neurons of a trained model, each set so that a given share of the (token, neuron)
pairs of a layer stays (set on the windows of the probe batch, measured on --windows validation windows):
  c      act(pre - C - d): the threshold rises by d, which also lowers what stays (ReLU family only)
  eps    post-activations with |post| <= eps become 0; the others stay as they are
  top_k  of each token the k post-activations of the largest |post| stay
All layers together, then (for the first way) each layer alone. For smooth activations `eps` and `top_k` say
what could be left out, not what is 0 by itself. Nothing is trained. Writes RUN/sparsify.csv.
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffnlab.errors import UserError
from ffnlab.intervene import Activity, Change, acts, changed, collected, drop_small, keep_largest, lower
from ffnlab.probe.activity import has_exact_zeros
from ffnlab.probe.base import thresholds
from ffnlab.record.rundir import read_info
from ffnlab.record.table import write_table
from ffnlab.trained import Trained
from ffnlab.verbs import show

FRACS = (0.5, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)
METHODS = ("c", "eps", "top_k")
SHOWN = 5  # shares in the summary
COLUMNS = ("method", "layer", "kept_frac", "active_frac", "loss", "rise", "rise_se")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as outputs/my-run")
    parser.add_argument(
        "--method", nargs="+", choices=METHODS, default=None, help="default: all that the activation allows"
    )
    parser.add_argument(
        "--fracs", nargs="+", type=float, default=list(FRACS), metavar="X", help="shares to keep"
    )
    parser.add_argument(
        "--windows", type=int, default=32, metavar="N", help="validation windows (default 32)"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.01, metavar="X", help="rise in nats at the knee (default 0.01)"
    )
    parser.add_argument(
        "--plugins", nargs="+", default=[], metavar="PACKAGE", help="packages whose code the run may use"
    )


def run(args: argparse.Namespace) -> int:
    check(args)
    trained = Trained(args.run, args.plugins)
    sites = acts(trained.model)
    if not sites:
        raise UserError(f"{args.run} has no FFN: there is nothing to make sparser")
    methods = allowed(trained, [name for found in sites.values() for name in found], args.method)
    batches = trained.batches(args.windows)
    rows = sweep(trained, sites, methods, sorted(args.fracs, reverse=True), batches)
    file = args.run / "sparsify.csv"
    write_table(file, COLUMNS, rows)
    base = next(r for r in rows if (r["method"], r["layer"]) == ("none", "all"))
    print(f"unchanged: {base['loss']:.4f} nats per token with {base['active_frac']:.2%} of the pairs active")
    val = read_info(args.run).get("final", {}).get("val/loss")
    of_training = f" (val/loss of training, on its own choice of windows: {val:.4f})" if val else ""
    print(f"on {sum(len(x) for x, _ in batches)} windows of the validation split{of_training}\n")
    present(rows, args.tolerance)
    print(f"\nall {len(rows)} measurements, with standard errors: {file}")
    print(f"its figure: ffnlab figures {args.run} sparsify")
    return 0


def check(args: argparse.Namespace) -> None:
    """All numbers in range, or a UserError that names each one that is not."""
    problems = [f"--fracs {f:g}: expected a share above 0 and up to 1" for f in args.fracs if not 0 < f <= 1]
    if args.windows < 1:
        problems.append(f"--windows {args.windows}: expected at least 1")
    if not 0 < args.tolerance < math.inf:
        problems.append(f"--tolerance {args.tolerance:g}: expected a positive number of nats")
    if problems:
        raise UserError(*problems)


def allowed(trained: Trained, names: list[str], wanted: Sequence[str] | None) -> list[str]:
    """The ways that can be gone; `c` needs an activation that feels C and is exactly 0 below it."""
    found = [trained.model.get_submodule(name) for name in names]
    zeros = all(has_exact_zeros(act) for act in found)
    feels = not any(getattr(inner, "shift_invariant", False) for act in found for inner in act.modules())
    if wanted and "c" in wanted and not (zeros and feels):
        why = "takes up a threshold that all neurons share" if zeros else "is nowhere exactly 0"
        raise UserError(
            f"--method c: this run's activation {why}, so a higher one switches nothing off; use eps or top_k"
        )
    return list(wanted or (METHODS if zeros and feels else METHODS[1:]))


Row = dict[str, Any]


def sweep(
    trained: Trained,
    sites: dict[str, list[str]],
    methods: list[str],
    fracs: list[float],
    batches: list[tuple[Tensor, Tensor]],
) -> list[Row]:
    """One row for each (method, layers, share) that is below what is active anyway."""
    above, post = calibration(trained, sites)
    base, dense = measure(trained, batches, {}, "output")
    rows = [
        row("none", label, 1.0, base, base, frac) for label, frac in {**dense, "all": mean(dense)}.items()
    ]
    for method in methods:
        together = ["all"] if method != methods[0] or len(sites) == 1 else ["all", *sites]
        for scope in together:
            labels = list(sites) if scope == "all" else [scope]
            for frac in fracs:
                changes: dict[str, Change] = {}
                for label in labels:
                    changes |= cut(method, sites[label], above, post, frac, dense[label])
                if not changes:
                    continue
                side = "input" if method == "c" else "output"
                losses, active = measure(trained, batches, changes, side)
                shown = mean(active) if scope == "all" else active[scope]
                rows.append(row(method, scope, frac, losses, base, shown))
    return rows


def calibration(trained: Trained, sites: dict[str, list[str]]) -> tuple[dict[str, Tensor], ...]:
    """By module, on the windows of the probe batch: how far each pre-activation lies above C (-inf where the
    neuron is not active), and the post-activations.
    """
    names = [name for found in sites.values() for name in found]
    windows, _ = trained.data.probe_tokens(1 if trained.data.n_val < 5 * trained.model.seq_len else 4)
    seen = []
    for side in ("input", "output"):
        with torch.no_grad(), collected(trained.model, names, side) as values, trained.precision():
            trained.model(windows.to(trained.device))
        seen.append({name: torch.cat(parts).float() for name, parts in values.items() if parts})
    pre, post = seen
    above = {}
    for name, values in pre.items():
        c = thresholds(trained.model, [name])
        above[name] = torch.where(post[name] != 0, values - (c[0] if c else 0), -torch.inf)
    return above, post


def cut(
    method: str,
    names: list[str],
    above: dict[str, Tensor],
    post: dict[str, Tensor],
    frac: float,
    active: float,
) -> dict[str, Change]:
    """The changes that leave the share `frac` of a layer's pairs; none where no more than that is active."""
    met = [name for name in names if name in post and len(post[name])]
    if frac >= active or not met:
        return {}
    if method == "top_k":
        return {name: partial(keep_largest, frac=frac) for name in names}
    if method == "eps":
        size = quantile(torch.cat([post[name].abs().flatten() for name in met]), 1 - frac)
        return {name: partial(drop_small, eps=size) for name in names}
    rise = max(0.0, quantile(torch.cat([above[name].flatten() for name in met]), 1 - frac))
    return {name: partial(lower, by=rise) for name in names}


def quantile(values: Tensor, share: float) -> float:
    """The value that the given share of `values` does not exceed."""
    rank = min(max(math.ceil(share * values.numel()), 1), values.numel())
    return values.kthvalue(rank).values.item()


def measure(
    trained: Trained,
    batches: list[tuple[Tensor, Tensor]],
    changes: dict[str, Change],
    side: Any,
) -> tuple[Tensor, dict[str, float]]:
    """Loss by batch and active fraction by layer, under the changes."""
    activity = Activity(trained.model)
    with changed(trained.model, changes, side), activity.on():
        return trained.losses(batches), activity.fracs()


def mean(fracs: dict[str, float]) -> float:
    return sum(fracs.values()) / len(fracs)


def row(method: str, layer: str, kept: float, losses: Tensor, base: Tensor, active: float) -> Row:
    """`rise` is over the unchanged model on the same batches; its standard error is over the batches."""
    rise = losses - base
    se = rise.std().item() / math.sqrt(len(rise)) if len(rise) > 1 else math.nan
    values = (method, layer, kept, active, losses.mean().item(), rise.mean().item(), se)
    return dict(zip(COLUMNS, values, strict=True))


def knee(rows: Sequence[Row], tolerance: float) -> Row | None:
    """The sparsest of the rows up to which the loss never rises by more than `tolerance`."""
    found = None
    for each in sorted(rows, key=lambda r: -r["active_frac"]):
        if not each["rise"] <= tolerance:
            break
        found = each
    return found


def present(rows: list[Row], tolerance: float) -> None:
    """A line for each way and its layers: where the knee is, and the rise at a few shares."""
    fracs = sorted({r["kept_frac"] for r in rows if r["method"] != "none"}, reverse=True)
    shown = fracs[:: max(1, -(-len(fracs) // SHOWN))]
    cells = []
    for method, layer in dict.fromkeys((r["method"], r["layer"]) for r in rows if r["method"] != "none"):
        own = [r for r in rows if (r["method"], r["layer"]) == (method, layer)]
        dense = [r for r in rows if (r["method"], r["layer"]) == ("none", layer)]
        rise = {r["kept_frac"]: f"{r['rise']:+.4f}" for r in own}
        cells.append(
            (f"{method} {layer}", at_knee(dense + own, tolerance), *(rise.get(frac, "-") for frac in shown))
        )
    heads = ("method, layers", f"active at {tolerance:g} nats", *(f"rise at {frac:.3g}" for frac in shown))
    show(
        "rise of the validation loss (nats) by the share of (token, neuron) pairs that is kept", heads, cells
    )


def at_knee(rows: Sequence[Row], tolerance: float) -> str:
    """The knee on paper: its active fraction, and whether it is where the trials began or ended."""
    found = knee(rows, tolerance)
    if found is None:
        return "not finite"
    lowest = found is min(rows, key=lambda r: r["active_frac"])
    where = "as it is" if found["method"] == "none" else "lowest tried" if lowest else ""
    return f"{found['active_frac']:.2%}{f' ({where})' if where else ''}"
