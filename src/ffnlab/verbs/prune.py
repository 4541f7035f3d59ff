"""Take out the neurons of a run that are never active: a smaller model that computes the same (E80).

Which neurons are never active is counted on training windows, what it costs is measured on validation
windows. A neuron that is active nowhere there may be on other text: then the outputs differ. The FFNs get
widths of their own (ffn.expansion_by_layer, ffn.match=width); all else stays. Writes a new run directory,
which sample, export, figures and the probes take like one that was trained.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

import ffnlab
from ffnlab import build
from ffnlab.errors import UserError
from ffnlab.intervene import Activity, risen
from ffnlab.nn.count import count, total
from ffnlab.nn.ffn.base import FFN
from ffnlab.nn.ffn.paired import Paired
from ffnlab.nn.sparse import obstacle
from ffnlab.record.files import free_for, whole_folder
from ffnlab.record.rundir import read_info
from ffnlab.trained import Trained
from ffnlab.validate import validate
from ffnlab.verbs import show
from ffnlab.verbs.import_ import write
from ffnlab.withheld import command

LEAST = 0.25  # of d_model: the narrowest FFN that a configuration can say
AT_ONCE = 8  # windows in a pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as outputs/my-run")
    parser.add_argument(
        "--out", type=Path, metavar="RUN", help="the new run directory (default: RUN with -pruned behind it)"
    )
    parser.add_argument(
        "--below",
        type=float,
        default=0.0,
        metavar="X",
        help="take out what is active on at most this share of the tokens (default 0: on none)",
    )
    parser.add_argument(
        "--windows", type=int, default=64, metavar="N", help="training windows to look at (default 64)"
    )
    parser.add_argument(
        "--plugins", nargs="+", default=[], metavar="PACKAGE", help="packages whose code the run may use"
    )


def run(args: argparse.Namespace) -> int:
    check(args)
    out = args.out or args.run.with_name(f"{args.run.name}-pruned")
    free_for(out)
    trained = Trained(args.run, args.plugins)
    if args.windows > trained.data.windows_per_epoch:
        raise UserError(f"--windows {args.windows}: the training split has {trained.data.windows_per_epoch}")
    ffns = prunable(trained)
    keep = kept(trained, ffns, args.windows, args.below)
    cfg = narrower(trained, {layer: int(keep[name].sum()) for layer, name in ffns.items()}, out)
    validate(cfg)
    small = build.model(cfg, trained.model.vocab_size).to(trained.device).eval()
    small.load_state_dict(cut(trained.model.state_dict(), keep))
    batches = trained.batches(32)
    before = trained.losses(batches)
    large, trained.model = trained.model, small
    after = trained.losses(batches)
    costs = [total(count(model, model.seq_len).values()) for model in (large, small)]
    info = {
        "status": "done",
        "command": command(),
        "parameters": costs[1].parameters,
        "flops_per_token": costs[1].flops_per_token,
        "versions": {"ffnlab": ffnlab.__version__, "torch": torch.__version__},
        **{key: value for key, value in read_info(args.run).items() if key in INHERITED},
        "pruned_from": {"path": str(args.run), "windows": args.windows, "below": args.below},
        "final": {"step": 0, "val/loss": float(after.mean())},
    }
    with whole_folder(out) as temporary:
        write(temporary, cfg, small.state_dict(), trained.data.tokenizer, {**info, "name": out.name})
    present(ffns, keep, costs, before, after)
    print(f"\n{out}")
    return 0


INHERITED = ("choices", "seeds", "precision", "vocab_size", "data")


def check(args: argparse.Namespace) -> None:
    """All numbers in range, or a UserError that names each one that is not."""
    problems = [] if args.windows >= 1 else [f"--windows {args.windows}: expected at least 1"]
    problems += [] if 0 <= args.below < 1 else [f"--below {args.below:g}: expected a share from 0 to below 1"]
    if problems:
        raise UserError(*problems)


def prunable(trained: Trained) -> dict[int, str]:
    """Layer -> name of its FFN. UserError where a neuron is more than a row in and a column out."""
    node, modules = trained.cfg["ffn"], dict(trained.model.named_modules())
    if node["share"] != "none" or node["extra"]:
        raise UserError(
            "ffn.share and ffn.extra tie the widths of several FFNs: there is nothing to prune singly"
        )
    names = {layer: f"blocks.{layer}.ffn" for layer in range(trained.model.n_layers)}
    found = {layer: name for layer, name in names.items() if name in modules}
    for name in found.values():
        ffn = modules[name]
        if not isinstance(ffn, FFN) or isinstance(ffn, Paired):
            raise UserError(f"{name} is a {type(ffn).__name__}: its neurons do not stand alone")
        if why := obstacle(ffn):
            raise UserError(f"{name} cannot be pruned without changing what it computes: {why}")
    if not found:
        raise UserError(f"{trained.path} has no FFN: there is nothing to prune")
    return found


@torch.no_grad()
def kept(
    trained: Trained, ffns: Mapping[int, str], windows: int, below: float
) -> dict[str, Bool[Tensor, " F"]]:
    """Which neurons stay: those active on a larger share than `below` of the tokens of training windows,
    and the busiest of the others up to the least width.
    """
    activity = Activity(trained.model)
    with activity.on():
        for step, first in enumerate(range(0, windows, AT_ONCE), start=1):
            tokens, _ = trained.data.batch(step, min(AT_ONCE, windows - first))
            with trained.precision():
                trained.model(tokens.to(trained.device))
    keep = {}
    for name in ffns.values():
        share = activity.active_frac(f"{name}.act")
        least = math.ceil(LEAST * trained.model.d_model)
        busiest = torch.zeros_like(share, dtype=torch.bool)
        busiest[share.topk(min(least, len(share))).indices] = True
        keep[name] = (share > below) | busiest
    return keep


def narrower(trained: Trained, widths: Mapping[int, int], out: Path) -> dict[str, Any]:
    """The configuration with these widths."""
    d_model = trained.model.d_model
    by_layer = [widths.get(layer, d_model) / d_model for layer in range(trained.model.n_layers)]
    own = {"expansion_by_layer": by_layer, "match": "width", "d_ff": None}
    return {**trained.cfg, "out": str(out), "ffn": {**trained.cfg["ffn"], **own}}


def cut(state: Mapping[str, Tensor], keep: Mapping[str, Bool[Tensor, " F"]]) -> dict[str, Tensor]:
    """The state dict without the rows and columns of the neurons that go."""
    small = dict(state)
    for ffn, stay in keep.items():
        for name, tensor in state.items():
            if not name.startswith(f"{ffn}."):
                continue
            if name == f"{ffn}.down.weight":
                small[name] = tensor[:, stay].contiguous()
            elif name != f"{ffn}.down.bias" and tensor.ndim and len(tensor) == len(stay):
                small[name] = tensor[stay].contiguous()
    return small


def present(
    ffns: Mapping[int, str],
    keep: Mapping[str, Tensor],
    costs: Sequence[Any],
    before: Tensor,
    after: Tensor,
) -> None:
    """What went, and what it costs and saves."""
    rows = [
        (
            f"L{layer:02d}",
            f"{len(keep[name]):,}",
            f"{int(keep[name].sum()):,}",
            f"{keep[name].float().mean():.1%}",
        )
        for layer, name in ffns.items()
    ]
    show("neurons that stay", ("layer", "before", "after", "share"), rows)
    if all(stay.all() for stay in keep.values()):
        print("nothing to take out: the new run is the old one")
    old, new = costs
    print(f"parameters {old.parameters:,} -> {new.parameters:,}", end=", ")
    print(f"FLOPs/token {old.flops_per_token:,} -> {new.flops_per_token:,}")
    _, rise, error = risen(after, before)
    print(f"validation loss {float(before.mean()):.4f}, rise {rise:+.5f} +- {error:.5f} (standard error)")
