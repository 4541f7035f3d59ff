"""Write a model of ours for others to load: transformers, TransformerLens or nanoGPT.

hf: a folder for AutoModelForCausalLM.from_pretrained.
transformer-lens: model.safetensors with the names of HookedTransformer, config.json with the fields of
HookedTransformerConfig.
nanogpt: model.safetensors with the names of its GPT, model_args.json with the arguments of its GPTConfig.
The weights are those of the newest complete checkpoint, without the padding of the vocabulary. Parts that
have no counterpart there are named, all of them, and nothing is written.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ffnlab.data import load_tokenizer
from ffnlab.errors import UserError
from ffnlab.formats import nanogpt, transformer_lens
from ffnlab.formats.families import family_out
from ffnlab.record.files import whole_folder, write_atomic
from ffnlab.record.rundir import read_info
from ffnlab.trained import newest_weights, whole_config


@dataclass(frozen=True)
class Trained:
    """A run as the formats see it; `end` is the id that ends a document, None where none does."""

    cfg: dict[str, Any]
    state: dict[str, Tensor]
    vocab_size: int
    end: int | None


@dataclass(frozen=True)
class Written:
    """A model in a format of others."""

    file: str
    description: dict[str, Any]
    weights: dict[str, Tensor]


def hf(run: Trained) -> Written:
    family = family_out(run.cfg)
    config = family.describe(run.cfg, run.state, run.vocab_size, run.end)
    return Written("config.json", config, family.theirs(run.state))


def for_transformer_lens(run: Trained) -> Written:
    fields = transformer_lens.describe(run.cfg, run.state, run.vocab_size)
    return Written("config.json", fields, transformer_lens.theirs(run.state, fields))


def for_nanogpt(run: Trained) -> Written:
    model_args = nanogpt.describe(run.cfg, run.state, run.vocab_size)
    return Written("model_args.json", model_args, nanogpt.theirs(run.state))


FORMATS: dict[str, Callable[[Trained], Written]] = {
    "hf": hf,
    "transformer-lens": for_transformer_lens,
    "nanogpt": for_nanogpt,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which run, to what, where."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as outputs/my-run")
    parser.add_argument("--to", required=True, choices=list(FORMATS), help="the format")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the new folder (default RUN/export/FORMAT)")


def run(args: argparse.Namespace) -> int:
    written = FORMATS[args.to](opened(args.run))
    out = args.out or args.run / "export" / args.to
    # each tensor in memory of its own, as safetensors wants it
    weights = {n: t.clone(memory_format=torch.contiguous_format) for n, t in written.weights.items()}
    with whole_folder(out) as folder:
        write_atomic(folder / "model.safetensors", safetensors.torch.save(weights, {"format": "pt"}))
        write_atomic(folder / written.file, json.dumps(written.description, indent=2) + "\n")
    print(f"exported: {out} (model.safetensors, {written.file})")
    return 0


def opened(path: Path) -> Trained:
    """The configuration and the weights of a run: the rows of padding cut off, a tied head left out."""
    cfg = whole_config(path)
    vocab_size = read_info(path).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise UserError(f"{path / 'run.json'} does not say the size of the vocabulary (vocab_size)")
    state = newest_weights(path)
    if cfg["model"]["tie_head"]:
        del state["head.weight"]
    state |= {name: state[name][:vocab_size] for name in ("embed.weight", "head.weight") if name in state}
    tokenizer = path / "tokenizer.json"
    end = load_tokenizer(tokenizer).eot if tokenizer.is_file() else None
    return Trained(cfg, state, vocab_size, end)
