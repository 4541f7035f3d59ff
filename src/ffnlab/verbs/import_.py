"""Make a run directory of a model that others saved: GPT-2 or one of the Llama family.

PATH is a folder that save_pretrained of transformers wrote (config.json and safetensors, in one file or
several). Nothing is downloaded, and nothing in the folder can run code. The run has no steps: sample, export
and the probes take it like one that was trained.
"""

import argparse
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ffnlab
from ffnlab import build
from ffnlab.data import Tokenizer
from ffnlab.data.tokenizers import GPT2
from ffnlab.errors import UserError
from ffnlab.formats.families import Family, family_in
from ffnlab.formats.folder import Folder, compare, open_folder
from ffnlab.formats.vocabulary import byte_level, read_vocabulary
from ffnlab.nn.count import count, total
from ffnlab.nn.gpt import GPT
from ffnlab.nn.memory import imagined
from ffnlab.record.checkpoint import save
from ffnlab.record.files import whole_folder
from ffnlab.record.rundir import RunDir
from ffnlab.validate import validate
from ffnlab.withheld import command

GPT2_TOKENS = 50257
HEAD = "head.weight"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What, from where, to where."""
    parser.add_argument("format", choices=["hf"], help="hf: a folder of transformers")
    parser.add_argument("path", type=Path, metavar="PATH", help="the folder")
    parser.add_argument(
        "--out", type=Path, metavar="RUN", help="the new run directory (default outputs/NAME-OF-THE-FOLDER)"
    )


def run(args: argparse.Namespace) -> int:
    folder = open_folder(args.path)
    family = family_in(folder.config)
    reading = family.read(folder.config)
    tokenizer = gpt2_tokenizer(args.path, reading.vocab_size)
    out = args.out or Path("outputs") / args.path.resolve().name
    cfg, choices = build.compose([*reading.overrides, *(["tokenizer=gpt2"] if tokenizer else [])])
    cfg["out"] = str(out)
    validate(cfg)
    with imagined():  # shapes only: what is asked of the folder, before anything large is read or made
        model = build.model(cfg, reading.vocab_size)
        expected = shapes(family, model)
    with whole_folder(out) as temporary:
        state = weights(folder, family, expected)
        write(temporary, cfg, state, tokenizer, {**facts(folder, cfg, choices, model), "name": out.name})
    print(f"imported: {out} ({sum(p.numel() for p in model.parameters()):,} parameters)")
    if tokenizer is None:
        warnings.warn(
            f"{args.path} has no tokenizer that ffnlab can represent, which is GPT-2's alone: "
            "the model takes token ids, not text",
            stacklevel=2,
        )
    return 0


def gpt2_tokenizer(path: Path, vocab_size: int) -> Tokenizer | None:
    """GPT-2's tokenizer, if the folder has its vocabulary."""
    vocabulary = read_vocabulary(path)
    if vocabulary is None or len(vocabulary) != GPT2_TOKENS or vocab_size < GPT2_TOKENS:
        return None
    tokenizer = GPT2().fit(())
    same = vocabulary == byte_level([tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)])
    return tokenizer if same else None


def shapes(family: Family, model: GPT) -> dict[str, tuple[int, ...]]:
    """What the folder must hold for this model."""
    state = model.state_dict()
    if model.settings.tie_head:
        del state[HEAD]
    return {name: tuple(tensor.shape) for name, tensor in family.theirs(state).items()}


def weights(folder: Folder, family: Family, expected: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Our state dict out of the folder, which holds the expected tensors and no others."""
    full = {name: family.canonical(name) for name in folder.tensors}
    names = {stored: name for stored, name in full.items() if name is not None}
    found = {name: folder.tensors[stored] for stored, name in names.items()}
    if len(found) < len(names):
        raise UserError(f"{folder.path} holds tensors twice, with and without the prefix of their names")
    tied = family.HEAD not in expected
    if tied and family.HEAD in found:  # older files have the embedding under both names
        expected = {**expected, family.HEAD: expected[family.EMBEDDING]}
    compare(found, expected)
    theirs = folder.load(names)
    embedding = theirs[family.EMBEDDING]
    if tied and not torch.equal(theirs.pop(family.HEAD, embedding), embedding):
        raise UserError(f"{family.HEAD} is not {family.EMBEDDING}; config.json says tie_word_embeddings=true")
    state = family.ours(theirs)
    return {**state, HEAD: state["embed.weight"]} if tied else state


def facts(folder: Folder, cfg: Mapping[str, Any], choices: Mapping[str, Any], model: GPT) -> dict[str, Any]:
    """What run.json says of an imported model."""
    cost = total(count(model, model.seq_len).values())
    return {
        "status": "done",
        "command": command(),
        "choices": {group: name for group, name in choices.items() if not group.startswith("hydra/")},
        "seeds": {"seed": cfg["seed"], "data": cfg["data"]["seed"]},
        "parameters": cost.parameters,
        "flops_per_token": cost.flops_per_token,
        "versions": {"ffnlab": ffnlab.__version__, "torch": torch.__version__},
        "vocab_size": model.vocab_size,
        "imported_from": {
            "format": "hf",
            "path": str(folder.path.resolve()),
            "model_type": folder.config["model_type"],
            "files": sorted({stored.file for stored in folder.tensors.values()}),
        },
        "final": {"step": 0},
    }


def write(
    path: Path,
    cfg: Mapping[str, Any],
    state: dict[str, Tensor],
    tokenizer: Tokenizer | None,
    info: dict[str, Any],
) -> None:
    """The run directory: configuration, weights as of step 0, tokenizer, run.json."""
    rundir = RunDir.open(path, dict(cfg), ignore=set(), steps_may_grow=False)
    try:
        save(path, 0, state, {}, keep_last=None)
        if tokenizer is not None:
            tokenizer.save(path / "tokenizer.json")
        rundir.update(**info)
    except FloatingPointError as error:
        raise UserError(f"the model holds numbers that are not finite: {error}") from None
    finally:
        rundir.close()
