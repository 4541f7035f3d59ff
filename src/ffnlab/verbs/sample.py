"""Continue a text with a trained model: the newest complete checkpoint of a run, and the run's tokenizer."""

import argparse
import codecs
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ffnlab.data import Tokenizer, load_tokenizer
from ffnlab.errors import UserError
from ffnlab.nn.crossover import Kernels
from ffnlab.nn.gpt import GPT
from ffnlab.trained import trained_model, trusted_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN and how to draw."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as outputs/my-run")
    parser.add_argument(
        "--prompt", default="", help="the text to continue (default: the start of a document)"
    )
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="how many tokens to add (default 200)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest (default 0.8)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    parser.add_argument(
        "--plugins", nargs="+", default=[], metavar="PACKAGE", help="packages whose code the run may use"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")


def run(args: argparse.Namespace) -> int:
    check(args)
    model, tokenizer = load_run(args.run, args.plugins)
    ids = start(tokenizer, args.prompt, model.seq_len)
    sys.stdout.write(args.prompt)
    model.vocab_size = min(model.vocab_size, tokenizer.vocab_size)  # what can be drawn can be read
    drawn = generate(model, ids, args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed)
    for text in stream(tokenizer, drawn):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def check(args: argparse.Namespace) -> None:
    """All numbers in range, or a UserError that names each one that is not."""
    problems = []
    try:
        args.prompt.encode()
    except UnicodeEncodeError:
        problems.append(f"--prompt {args.prompt!a}: these bytes are no UTF-8; give text")
    if args.tokens < 1:
        problems.append(f"--tokens {args.tokens}: expected at least 1")
    if not -(2**63) <= args.seed < 2**64:
        problems.append(f"--seed {args.seed}: expected a number of at most 64 bits")
    if args.temperature != 0 and not 1e-6 <= args.temperature < float("inf"):
        problems.append(
            f"--temperature {args.temperature}: expected 0 (the likeliest token) or a positive number"
        )
    if args.top_k is not None and args.top_k < 1:
        problems.append(f"--top-k {args.top_k}: expected at least 1")
    if problems:
        raise UserError(*problems)


def load_run(path: Path, plugins: Sequence[str] = ()) -> tuple[GPT, Tokenizer]:
    """The model of a run, as its newest complete checkpoint has it, and the run's tokenizer."""
    cfg = trusted_config(path, plugins)
    if not (path / "tokenizer.json").is_file():
        raise UserError(
            f"{path} has no tokenizer.json: it was trained on token ids alone, which cannot be read as text"
        )
    tokenizer = load_tokenizer(path / "tokenizer.json")
    model = trained_model(path, cfg, tokenizer.vocab_size)
    if cfg["ffn"].get("kernel", "dense") != "dense":  # one token reads the rows of its active neurons only
        ways = Kernels(model, "auto", torch.float32)
        ways.restore(dict.fromkeys(ways.state(), True))
    return model, tokenizer


def start(tokenizer: Tokenizer, prompt: str, seq_len: int) -> list[int]:
    """The ids that the model sees first: the prompt's last `seq_len`, or the end mark without a prompt."""
    ids = tokenizer.encode(prompt)
    if not ids and tokenizer.eot is None:
        raise UserError("--prompt is empty, and this tokenizer has no end mark to start from: give a prompt")
    if len(ids) > seq_len:
        warnings.warn(
            f"the prompt has {len(ids)} tokens, the model sees {seq_len}: only the last {seq_len} are used",
            stacklevel=2,
        )
    return ids[-seq_len:] or [int(tokenizer.eot or 0)]


@torch.inference_mode()
def generate(
    model: GPT, ids: list[int], n: int, *, temperature: float, top_k: int | None, seed: int
) -> Iterator[int]:
    """n ids that follow `ids`, each drawn from softmax(logits / temperature) over the true vocabulary."""
    rng = torch.Generator().manual_seed(seed)
    window, past = list(ids), {}
    for _ in range(n):
        logits = model.head.logits(last_hidden(model, window, past))[: model.vocab_size]
        window.append(draw(logits, temperature, top_k, rng))
        yield window[-1]


def last_hidden(model: GPT, window: list[int], past: dict[Any, Tensor]) -> Float[Tensor, " D"]:
    """What the head reads at the last token. As long as all fit, the new token alone is computed, and
    `past` holds what it needs of the others; a longer window moves, and with it every position, so all is
    computed anew.
    """
    if len(window) > model.seq_len or not can_follow(model):
        return model.hidden(torch.tensor([window[-model.seq_len :]]))[0, -1]
    start = len(window) - 1 if past else 0
    return model.follow(torch.tensor([window[start:]]), past, start)[0, -1]


def can_follow(model: GPT) -> bool:
    """Whether each part gives a token alone what it gives it among others: not an expert with a capacity,
    which the tokens before it have used up, nor code of others, which need not know of it.
    """
    kinds = [type(m).__module__.partition(".")[0] for m in model.modules()]
    shared = any(getattr(m, "capacity", None) is not None for m in model.modules())
    return set(kinds) <= {"ffnlab", "torch"} and not shared


def draw(logits: Tensor, temperature: float, top_k: int | None, rng: torch.Generator) -> int:
    """One id out of logits (V,); the likeliest for temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    values, order = logits.topk(min(top_k or len(logits), len(logits)))
    chosen = torch.multinomial(torch.softmax(values / temperature, dim=-1), 1, generator=rng)
    return int(order[chosen])


def stream(tokenizer: Tokenizer, ids: Iterator[int]) -> Iterator[str]:
    """The text of ids, as soon as its characters are complete; a token may end inside one."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in ids:
        yield decoder.decode(tokenizer.token_bytes(token))
    yield decoder.decode(b"", final=True)
