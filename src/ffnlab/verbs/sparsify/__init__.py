"""Draw the validation loss of a run against its active fraction: fewer neurons, by a higher C, top-k or eps.

Three ways to leave out neurons of a trained model, each set so that a given share of the (token, neuron)
pairs of a layer stays (set on the windows of the probe batch, measured on --windows validation windows):
  c      act(pre - C - d): the threshold rises by d, which also lowers what stays (ReLU family only)
  eps    post-activations with |post| <= eps become 0; the others stay as they are
  top_k  of each token the k post-activations of the largest |post| stay
All layers together, then (for the first way) each layer alone. Nothing is trained. Writes RUN/sparsify.csv.

Skippable is the share of all FLOPs of training that a kernel for active pairs only would leave out at these
active fractions: for activations with exact zeros what `ffn.kernel=sparse` skips, for smooth ones an upper
bound, as `eps` and `top_k` say what could be left out, not what is 0 by itself.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ffnlab.errors import UserError
from ffnlab.intervene import Activity, Change, acts, changed, risen
from ffnlab.layers import ffns
from ffnlab.nn.count import TRAINING, count, total
from ffnlab.nn.gpt import GPT
from ffnlab.record.rundir import read_info
from ffnlab.record.table import write_table
from ffnlab.trained import Trained
from ffnlab.verbs import show
from ffnlab.verbs.sparsify.cuts import METHODS, allowed, calibration, cut

FRACS = (0.5, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)
SHOWN = 5  # shares in the summary
COLUMNS = ("method", "layer", "kept_frac", "active_frac", "loss", "rise", "rise_se", "skippable_frac")


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
    weights = per_neuron(trained.model)
    base, dense = measure(trained, batches, {}, "output")
    rows = [row("none", scope, 1.0, base, base, dense, weights) for scope in (*sites, "all")]
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
                rows.append(row(method, scope, frac, losses, base, active, weights))
    return rows


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


def per_neuron(model: GPT) -> dict[str, float]:
    """By layer, the share of all FLOPs of training that would fall away if no neuron were active; 0 for an
    FFN of a user's own class, of which that is not known.
    """
    everything = TRAINING * total(count(model, model.seq_len).values()).flops_per_token
    return {label: ffn.neuron_flops_per_token() / everything for label, ffn in ffns(model).items()}


def row(
    method: str,
    scope: str,
    kept: float,
    losses: Tensor,
    base: Tensor,
    active: dict[str, float],
    weights: dict[str, float],
) -> Row:
    """Active fraction (mean over layers) and skippable share (sum over them) are those of the layers that
    were changed, the loss is that of the whole model.
    """
    own = active if scope == "all" else {scope: active[scope]}
    skippable = sum((1 - p) * weights.get(label, 0.0) for label, p in own.items())
    values = (method, scope, kept, sum(own.values()) / len(own), *risen(losses, base), skippable)
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
            (f"{method} {layer}", *at_knee(dense + own, tolerance), *(rise.get(frac, "-") for frac in shown))
        )
    heads = (
        "method, layers",
        f"active at {tolerance:g} nats",
        "skippable",
        *(f"rise at {frac:.3g}" for frac in shown),
    )
    show(
        "rise of the validation loss (nats) by the share of (token, neuron) pairs that is kept", heads, cells
    )


def at_knee(rows: Sequence[Row], tolerance: float) -> tuple[str, str]:
    """The knee on paper: its active fraction, whether it is where the trials began or ended, and its
    skippable share.
    """
    found = knee(rows, tolerance)
    if found is None:
        return "not finite", "-"
    lowest = found is min(rows, key=lambda r: r["active_frac"])
    where = "as it is" if found["method"] == "none" else "lowest tried" if lowest else ""
    return f"{found['active_frac']:.2%}{f' ({where})' if where else ''}", f"{found['skippable_frac']:.1%}"
