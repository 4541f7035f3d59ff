"""The matrix-product rate; runs are compared with the fastest seen here."""

import argparse
import json

from ffnlab.cache import cache_dir
from ffnlab.device import DTYPES, choose_device, has_bf16
from ffnlab.nn.rate import machine, measure, remember
from ffnlab.verbs import quantity, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))


def run(args: argparse.Namespace) -> int:
    """The rate of this moment, and the fastest ever measured here, with which runs are compared."""
    device = choose_device(args.device)
    dtypes = [DTYPES["fp32"], *([DTYPES["bf16"]] if has_bf16(device) else [])]
    rates = {}
    for dtype in dtypes:
        now = measure(device, dtype)
        kept = remember(cache_dir(), device, dtype, now)
        rates[str(dtype).removeprefix("torch.")] = {"now_flops_per_s": now, "kept_flops_per_s": kept}
    if args.json:
        print(json.dumps({"machine": machine(device, dtypes[0]), "rates": rates}, indent=2))
    else:
        rows = [
            (name, quantity(r["now_flops_per_s"], "FLOP/s"), quantity(r["kept_flops_per_s"], "FLOP/s"))
            for name, r in rates.items()
        ]
        show(machine(device, dtypes[0]), ("matrix product", "now", "kept"), rows)
    return 0
