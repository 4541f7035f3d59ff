"""Print what a configuration costs without training it: parameters, FLOPs per token, bytes, memory."""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import torch

from ffnlab import build
from ffnlab.device import autocast, choose_device, choose_precision
from ffnlab.layers import layer_expansions
from ffnlab.nn.count import TRAINING, Cost, count, tied, total
from ffnlab.nn.ffn.base import FeedForward
from ffnlab.nn.gpt import GPT
from ffnlab.nn.memory import estimate, imagined
from ffnlab.validate import validate
from ffnlab.verbs import mebibytes, quantity, show, vocabulary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py: ffn=swiglu model=micro ..."
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="instead of the data's (which are then not read)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    cfg, choices = build.compose(args.overrides)
    validate(cfg)
    facts = summarise(cfg, choices, vocabulary(cfg, args.vocab_size))
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        present(facts)
    return 0


def summarise(cfg: Mapping[str, Any], choices: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """All figures of the summary as plain values."""
    train = cfg["train"]
    # An explicit wish is taken as it is: a run is sized here that may be made elsewhere.
    device = choose_device("auto") if train["device"] == "auto" else torch.device(train["device"])
    precision = choose_precision("auto", device) if train["precision"] == "auto" else train["precision"]
    with imagined():
        model = build.model(cfg, vocab_size)
        costs = count(model, model.seq_len)
        memory = estimate(
            model,
            build.optimizer(cfg, model),
            batch_size=train["batch_size"],
            grad_accum=train["grad_accum"],
            # Imagined tensors lie on the CPU, wherever the run will be.
            precision=autocast(torch.device("cpu"), precision),
            checkpointed=train["checkpoint_activations"],
            device=device.type,
        )
        whole = total(costs.values())
        return {
            "model": {
                "layers": model.n_layers,
                "d_model": model.d_model,
                "heads": cfg["model"]["n_heads"],
                "seq_len": model.seq_len,
                "vocab_size": vocab_size,
                "padded_vocab_size": model.embed.num_embeddings,
            },
            "components": {name: dataclasses.asdict(cost) for name, cost in costs.items()},
            "total": dataclasses.asdict(whole),
            "training_flops_per_token": TRAINING * whole.flops_per_token,
            "tied": [list(pair) for pair in tied(model)],
            "ffn": ffn_facts(cfg, choices, model, costs["ffn"], whole),
            "batch": {"sequences": train["batch_size"], "tokens": train["batch_size"] * model.seq_len},
            "precision": precision,
            "optimizer": choices["optim"],
            "memory": dataclasses.asdict(memory),
        }


def ffn_facts(
    cfg: Mapping[str, Any], choices: Mapping[str, Any], model: GPT, ffn: Cost, whole: Cost
) -> dict[str, Any]:
    """The FFN's name, its widths, the plain MLP that it was matched to, and its shares of the model."""
    node = cfg["ffn"]
    ffns = [part for name, part in model.named_modules() if re.fullmatch(r"blocks\.\d+\.ffn\w*", name)]
    matched = node["d_ff"] is None
    plain = {round(expansion * model.d_model) for expansion in layer_expansions(node, model.n_layers)}
    return {
        "name": choices["ffn"],
        "act": choices["act"],
        "d_ff": sorted({part.d_ff for part in ffns if isinstance(part, FeedForward)}),
        "match": node["match"] if matched else "d_ff",
        "matched": node.get("matched"),  # of experts: active or total
        "baseline_d_ff": sorted(plain) if matched else [],
        "share_of_parameters": ffn.parameters / max(1, whole.parameters),
        "share_of_flops": ffn.flops_per_token / max(1, whole.flops_per_token),
        "parameters": ffn.parameters,
        "active_parameters": ffn.active_parameters,
    }


def present(facts: Mapping[str, Any]) -> None:
    """The same figures as tables and sentences."""
    m, whole, ffn, memory = facts["model"], facts["total"], facts["ffn"], facts["memory"]
    rows = [
        component_row(name, cost, whole)
        for name, cost in {**facts["components"], "total": whole}.items()
        if cost["parameters"] or cost["flops_per_token"]
    ]
    title = (
        f"{m['layers']} layers x {m['d_model']}, {m['heads']} heads, {m['seq_len']} positions, "
        f"vocabulary {m['vocab_size']:,} (padded to {m['padded_vocab_size']:,})"
    )
    show(title, ("component", "parameters", "share", "FLOPs/token", "share", "bytes"), rows)
    print()
    print("\n".join(tied_lines(facts["tied"])), end="\n" if facts["tied"] else "")
    print(ffn_line(ffn))
    step = quantity(facts["training_flops_per_token"] * facts["batch"]["tokens"], "FLOP")
    print(f"A step of {facts['batch']['tokens']:,} tokens costs {step}, forward and backward.\n")
    names = {"optimizer": f"optimizer ({facts['optimizer']})", "peak": "peak of an update"}
    show(
        f"training memory: {facts['batch']['sequences']} x {m['seq_len']} tokens, {facts['precision']}",
        ("kind", "bytes"),
        [(str(names.get(kind, kind)), mebibytes(size)) for kind, size in memory.items()],
    )


def tied_lines(pairs: list[list[str]]) -> list[str]:
    """One line for every parameter that has other names."""
    others: dict[str, list[str]] = {}
    for counted, other in pairs:
        others.setdefault(counted, []).append(other)
    return [
        f"tied: {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} is {counted}, "
        f"counted once, at {counted.split('.')[0]}"
        for counted, names in others.items()
    ]


def component_row(name: str, cost: Mapping[str, int], whole: Mapping[str, int]) -> tuple[str, ...]:
    return (
        name,
        f"{cost['parameters']:,}",
        f"{cost['parameters'] / max(1, whole['parameters']):.1%}",
        f"{cost['flops_per_token']:,}",
        f"{cost['flops_per_token'] / max(1, whole['flops_per_token']):.1%}",
        mebibytes(cost["bytes"]),
    )


def ffn_line(ffn: Mapping[str, Any]) -> str:
    """The FFN in one sentence."""
    if not ffn["d_ff"]:
        return "This model has no FFN."
    widths, plain = (", ".join(map(str, ffn[key])) for key in ("d_ff", "baseline_d_ff"))
    which = f"{ffn['matched']} " if ffn["matched"] else ""
    how = {
        "params": f"{which}parameters nearest to those of the plain MLP of d_ff {plain}",
        "flops": f"FLOPs nearest to those of the plain MLP of d_ff {plain}",
        "width": f"the width of the plain MLP, {plain}",
        "d_ff": "given by ffn.d_ff",
    }[ffn["match"]]
    few = ffn["active_parameters"] < ffn["parameters"]
    met = (
        f" a token meets {ffn['active_parameters']:,} of its {ffn['parameters']:,} parameters;" if few else ""
    )
    return (
        f"FFN: {ffn['name']} with {ffn['act']}, d_ff {widths} ({how});{met} "
        f"{ffn['share_of_parameters']:.1%} of all parameters, {ffn['share_of_flops']:.1%} of all FLOPs."
    )
