"""Take neurons or a whole FFN out of a trained run, and see what its validation loss does.

What is taken out, each on its own: FFNs (--layer L03), single neurons (--neuron L03:17), the neurons that no
token of the scan activates (--never-active), the K least or most active ones of every layer (--least K,
--most K). Without any of these: every FFN, the never-active neurons, and 1 % and 10 % of each layer's neurons
from both ends. Activity is the share of scan tokens with a post-activation other than 0; for activations
without exact zeros it is the mean |post|. A neuron that is out puts out 0, or with --mean its mean over the
scan. Nothing is trained. Writes RUN/ablate.csv.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffnlab.errors import UserError, unknown
from ffnlab.intervene import Activity, Change, acts, changed, collected, risen
from ffnlab.probe.activity import has_exact_zeros
from ffnlab.record.table import write_table
from ffnlab.trained import Trained
from ffnlab.verbs import show

COLUMNS = ("what", "layer", "neurons", "loss", "rise", "rise_se", "instead")
SHARES = (0.01, 0.1)
SCAN_BATCH = 8  # windows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as outputs/my-run")
    parser.add_argument("--layer", nargs="+", default=[], metavar="L03", help="FFNs")
    parser.add_argument("--neuron", nargs="+", default=[], metavar="L03:17", help="single neurons")
    parser.add_argument("--never-active", action="store_true", help="neurons active on no token of the scan")
    parser.add_argument("--least", nargs="+", type=int, default=[], metavar="K", help="of every layer")
    parser.add_argument("--most", nargs="+", type=int, default=[], metavar="K", help="of every layer")
    parser.add_argument("--mean", action="store_true", help="put the mean in place, not 0")
    parser.add_argument(
        "--windows", type=int, default=32, metavar="N", help="validation windows (default 32)"
    )
    parser.add_argument(
        "--scan",
        type=int,
        default=16384,
        metavar="N",
        help="tokens that activity is taken on (default 16384)",
    )
    parser.add_argument(
        "--plugins", nargs="+", default=[], metavar="PACKAGE", help="packages whose code the run may use"
    )


class Out(NamedTuple):
    """One ablation: its name, the layers that it is about, how many neurons, and what is changed."""

    what: str
    layer: str
    neurons: int
    changes: dict[str, Change]


def run(args: argparse.Namespace) -> int:
    check(args)
    trained = Trained(args.run, args.plugins)
    layers = Layers(trained, args.scan)
    if not layers.acts:
        raise UserError(f"{args.run} has no FFN: there is nothing to take out")
    outs = list(ablations(args, layers))
    batches = trained.batches(args.windows)
    base = trained.losses(batches)
    rows = [row(Out("nothing", "all", 0, {}), base, base)]
    for out in outs:
        with changed(trained.model, out.changes, "output"):
            rows.append(row(out, trained.losses(batches), base))
    file = args.run / "ablate.csv"
    instead = "mean" if args.mean else "zero"
    write_table(file, COLUMNS, [{**each, "instead": instead} for each in rows])
    how = "its mean" if args.mean else "0"
    show(
        f"validation loss without some neurons ({how} in place)",
        ("out, layers", "neurons", "loss (nats)", "rise", "s.e."),
        [cells(r) for r in rows],
    )
    print(f"\n{file}\nits figure: ffnlab figures {args.run} ablate")
    return 0


def check(args: argparse.Namespace) -> None:
    """All numbers in range, or a UserError that names each one that is not."""
    problems = [
        f"--{name} {value}: expected at least 1"
        for name, values in (("least", args.least), ("most", args.most))
        for value in values
        if value < 1
    ]
    problems += [
        f"--{name} {getattr(args, name)}: expected at least 1"
        for name in ("windows", "scan")
        if getattr(args, name) < 1
    ]
    problems += [
        f"--neuron {text}: expected a layer and a number, such as L03:17"
        for text in args.neuron
        if not re.fullmatch(r"L\w+:\d+", text)
    ]
    if problems:
        raise UserError(*problems)


class Layers:
    """The neurons of every layer, numbered through, with what they did on the scan."""

    def __init__(self, trained: Trained, scan_tokens: int):
        model = self.model = trained.model
        self.acts = acts(model)
        self.activity = Activity(model)
        self.ffns = {label: ffn_of(found[0]) for label, found in self.acts.items()}
        windows = trained.data.scan_tokens(scan_tokens).to(trained.device)
        sums: dict[str, Tensor] = {}
        with torch.no_grad(), self.activity.on():
            for part in windows.split(SCAN_BATCH):
                with collected(model, list(self.ffns.values()), "output") as seen, trained.precision():
                    model.hidden(part)
                for name, values in seen.items():
                    sums[name] = sums.get(name, 0) + torch.cat(values).float().sum(0)
        self.mean_branch = {name: total / windows.numel() for name, total in sums.items()}

    def width(self, label: str) -> int:
        return sum(len(self.score(name)) for name in self.acts[label])

    def score(self, name: str) -> Float[Tensor, " F"]:
        """How active each neuron of a module is."""
        if has_exact_zeros(self.model.get_submodule(name)):
            return self.activity.active_frac(name)
        return self.activity.mean_size(name)

    def scores(self, label: str) -> Float[Tensor, " F"]:
        """How active each neuron of a layer is."""
        return torch.cat([self.score(name) for name in self.acts[label]])

    def without(self, label: str, neurons: Int[Tensor, " n"], mean: bool) -> dict[str, Change]:
        """The changes that take neurons of a layer out."""
        changes: dict[str, Change] = {}
        first = 0
        for name in self.acts[label]:
            width = len(self.score(name))
            own = neurons[(neurons >= first) & (neurons < first + width)] - first
            if len(own):
                means = self.activity.mean(name)[own] if mean else torch.zeros(len(own))
                changes[name] = partial(put, neurons=own, values=means)
            first += width
        return changes

    def without_ffn(self, label: str, mean: bool) -> dict[str, Change]:
        """The change that takes the branch of a layer out."""
        name = self.ffns[label]
        value = self.mean_branch[name] if mean else torch.zeros(())
        return {name: lambda branch: value.to(branch).expand_as(branch)}


def ffn_of(act: str) -> str:
    """The FFN that an activation module is in: blocks.3.ffn.experts.0.act -> blocks.3.ffn."""
    return ".".join(act.split(".")[:3])


def put(post: Tensor, neurons: Tensor, values: Tensor) -> Tensor:
    """`post` with the given columns set."""
    changed = post.clone()
    changed[..., neurons.to(post.device)] = values.to(post)
    return changed


def ablations(args: argparse.Namespace, layers: Layers) -> Iterator[Out]:
    """What was asked for, or the usual questions."""
    named = [*args.layer, *(text.partition(":")[0] for text in args.neuron)]
    if wrong := [unknown("layer", label, layers.acts) for label in named if label not in layers.acts]:
        raise UserError(*wrong)
    usual = not (args.layer or args.neuron or args.never_active or args.least or args.most)
    for label in layers.acts if usual else args.layer:
        yield Out("ffn", label, layers.width(label), layers.without_ffn(label, args.mean))
    for text in args.neuron:
        label, _, number = text.partition(":")
        if int(number) >= layers.width(label):
            raise UserError(f"--neuron {text}: {label} has the neurons 0 to {layers.width(label) - 1}")
        yield Out(f"neuron {number}", label, 1, layers.without(label, torch.tensor([int(number)]), args.mean))
    if usual or args.never_active:
        yield everywhere("never active", layers, lambda s: (s == 0).nonzero().flatten(), args.mean)
    for name, largest, counts in (("least", False, args.least), ("most", True, args.most)):
        for k in counts:
            pick = partial(extreme, k=k, largest=largest)
            yield everywhere(f"{name} active {k}", layers, pick, args.mean)
        for share in SHARES if usual else ():
            pick = partial(extreme, k=share, largest=largest)
            yield everywhere(f"{name} active {share:.0%}", layers, pick, args.mean)


def extreme(scores: Tensor, k: float, largest: bool) -> Tensor:
    """The k neurons (below 1: that share of them) with the smallest or largest score; the first ones of equal
    score.
    """
    count = min(max(1, round(k * len(scores))) if k < 1 else int(k), len(scores))
    return scores.sort(descending=largest, stable=True).indices[:count]


def everywhere(what: str, layers: Layers, pick: Callable[[Tensor], Tensor], mean: bool) -> Out:
    """The picked neurons of all layers at once."""
    changes: dict[str, Change] = {}
    count = 0
    for label in layers.acts:
        neurons = pick(layers.scores(label))
        count += len(neurons)
        changes |= layers.without(label, neurons, mean)
    return Out(what, "all", count, changes)


def row(out: Out, losses: Tensor, base: Tensor) -> dict[str, Any]:
    """`rise` is over the whole model."""
    values = (out.what, out.layer, out.neurons, *risen(losses, base))
    return dict(zip(COLUMNS[:-1], values, strict=True))


def cells(r: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{r['what']}, {r['layer']}",
        f"{r['neurons']:,}",
        f"{r['loss']:.4f}",
        f"{r['rise']:+.4f}",
        f"{r['rise_se']:.4f}",
    )
