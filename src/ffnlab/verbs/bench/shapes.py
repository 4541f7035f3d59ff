"""Wide and shallow against deep and narrow at equal parameters: tokens/s and use of the matrix products.

E103. At every depth the blocks of the configuration get the width at which they hold as many parameters
(embedding and head left out): d_model to a multiple of 8, heads of about the configured size, and
ffn.expansion for the rest, so that all agree within 1 %; depths where that cannot be are named. Equal
parameters are equal FLOPs in the products with weights; the scores of attention are 4 T d_model more in every
layer, so that a deep shape costs more, as its FLOPs per token say. All shapes take turns in every round;
figures are medians over the rounds of a forward and backward pass through the blocks alone. The rate is that
of square matrix products just before each pass. Bare products are those of the blocks' own matrices, forward
and backward, with nothing in between: what they reach of that rate, and how much of the pass they would take.
"""

import argparse
import math
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ffnlab import build
from ffnlab.device import DTYPES, choose_device, choose_precision, set_threads
from ffnlab.errors import UserError
from ffnlab.nn.gpt import Context, run_block
from ffnlab.nn.rate import machine, product
from ffnlab.validate import validate
from ffnlab.verbs import mebibytes, quantity, show
from ffnlab.verbs.bench.contest import (
    Contestant,
    Part,
    add_contest_arguments,
    alternate,
    at_least_one,
    report,
    windows,
)
from ffnlab.verbs.bench.depths import Config, at_depth, blocks, cost, size
from ffnlab.verbs.bench.products import Products

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py: model=small ...")
    parser.add_argument("--params", type=int, metavar="N", help="of all blocks (default: as configured)")
    parser.add_argument("--depths", type=int, nargs="+", metavar="N", help=f"(default {DEPTHS})")
    add_contest_arguments(parser)


def run(args: argparse.Namespace) -> int:
    depths = args.depths or DEPTHS
    at_least_one(rounds=args.rounds, tokens=args.tokens, params=args.params, depths=min(depths))
    cfg, _ = build.compose(args.overrides)
    validate(cfg)
    device = choose_device(cfg["train"]["device"])
    precision = choose_precision(cfg["train"]["precision"], device)
    threads = set_threads(cfg["train"]["threads"], None)
    wanted = args.params or size(cfg).active_parameters
    found = {depth: at_depth(cfg, depth, wanted) for depth in depths}
    shapes = [shape for shape in found.values() if shape]
    if not shapes:
        raise UserError(
            f"no depth of {list(depths)} gives blocks of {wanted:,} parameters within 1 %: give other "
            f"--depths or --params (the blocks as configured hold {size(cfg).active_parameters:,})"
        )
    torch.manual_seed(0)
    rate = product(device, DTYPES[precision])
    batch = windows(cfg, args.tokens)
    parts = [stack(shape, batch, device, precision, rate) for shape in shapes]
    bare = [Products(part.module, math.prod(batch), device, DTYPES[precision]) for part in parts]
    contestants: list[Contestant] = [each for pair in zip(parts, bare, strict=True) for each in pair]
    alternate(contestants, args.rounds)
    rows = [figures(*each) for each in zip(shapes, parts, bare, strict=True)]
    facts = {
        "machine": machine(device, DTYPES[precision]),
        "precision": precision,
        "threads": threads,
        "rounds": args.rounds,
        "tokens": math.prod(batch),
        "parameters": wanted,
        "without_shape": [depth for depth, shape in found.items() if not shape],
        "rows": rows,
    }
    report(args, facts, present)
    return 0


def stack(cfg: Config, batch: tuple[int, int], device: torch.device, precision: str, rate: Any) -> Part:
    """The blocks of a shape, one after the other, without what stands between blocks."""
    module = blocks(cfg).to(device)
    layers: Any = module["blocks"]
    tokens = torch.zeros(batch, dtype=torch.long, device=device)

    def forward(x: Tensor) -> list[Tensor]:
        ctx = Context(tokens)
        for layer in layers:
            x = run_block(layer, x, ctx)
        return [x, *(ctx.penalties or ())]

    x = torch.randn(*batch, cfg["model"]["d_model"]).to(device)
    flops = cost(module, batch[1]).flops_per_token * math.prod(batch)
    name = f"{cfg['model']['n_layers']} x {cfg['model']['d_model']}"
    return Part(name, module, forward, x, precision, flops, rate)


def figures(cfg: Config, part: Part, bare: Products) -> dict[str, Any]:
    """A row: the shape, what a pass took, and what the bare products took in the same round."""
    layer: Any = part.module["blocks"][0]  # type: ignore[index]
    own = part.figures()
    pairs = list(zip(part.times, bare.times, strict=True))
    return {
        "layers": cfg["model"]["n_layers"],
        "d_model": cfg["model"]["d_model"],
        "n_heads": cfg["model"]["n_heads"],
        "d_ff": getattr(layer["ffn"], "d_ff", None) if "ffn" in layer else None,
        "parameters": size(cfg).active_parameters,
        "flops_per_token": part.flops // part.x.shape[:-1].numel(),
        "tok_per_s": 1e3 * part.x.shape[:-1].numel() / own["forward_backward_ms"],
        **{key: own[key] for key in ("forward_ms", "forward_backward_ms", "spread_frac")},
        "matrix_rate_frac": own["matrix_rate_frac"],
        "bare_matrix_rate_frac": median(bare.flops / s / t.rate for t, s in pairs),
        "bare_time_frac": median(s / t.both for t, s in pairs),
        "saved_bytes": own["saved_bytes"],
        "peak_bytes": own["peak_bytes"],
    }


def present(facts: Mapping[str, Any]) -> None:
    headers = ("layers", "d_model", "heads", "d_ff", "parameters", "FLOPs/token", "tok/s", "spread")
    headers += ("of rate", "bare, of rate", "bare, of pass", "saved")
    rows = [
        (
            *(str(row[key]) for key in ("layers", "d_model", "n_heads", "d_ff")),
            f"{row['parameters']:,}",
            quantity(row["flops_per_token"]),
            f"{row['tok_per_s']:,.0f}",
            *(
                f"{row[key]:.0%}"
                for key in ("spread_frac", "matrix_rate_frac", "bare_matrix_rate_frac", "bare_time_frac")
            ),
            mebibytes(row["saved_bytes"]),
        )
        for row in facts["rows"]
    ]
    title = (
        f"blocks of {facts['parameters']:,} parameters, {facts['tokens']:,} tokens, {facts['precision']}, "
        f"{facts['threads']} threads, medians of {facts['rounds']} rounds in turn"
    )
    show(title, headers, rows)
    if facts["without_shape"]:
        print(f"No shape within 1 % at {', '.join(map(str, facts['without_shape']))} layers.")
