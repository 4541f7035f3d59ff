"""The decoder: embedding, blocks, final norm, head. Which parts stand in it is decided by build.py alone.

Axes: B batch, T position, D d_model, V vocabulary (padded).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.utils.checkpoint
from jaxtyping import Float, Int
from torch import Tensor, nn

from ffnlab.nn.head import Head
from ffnlab.nn.penalty import take, with_penalties
from ffnlab.nn.residual import Residual

# model.order -> the sublayers of a block, in the order in which they stand in it
ORDERS = {
    "attn_ffn": ("attn", "ffn", "ffn_extra"),
    "ffn_attn": ("ffn", "ffn_extra", "attn"),
    "parallel": ("attn", "ffn", "ffn_extra"),
}


@dataclass(frozen=True)
class ModelSettings:
    """The `model` group of the configuration (configs/train.yaml says what each key means)."""

    seq_len: int
    d_model: int
    n_layers: int
    n_heads: int
    order: str
    tie_head: bool
    softcap: float | None
    pad_vocab_to: int
    mask_padding: bool
    dropout: float
    init: str
    zero_out: bool
    value_embeddings: list[list[int]]
    drop_attn: list[int]
    drop_ffn: list[int]


@dataclass
class Context:
    """What the parts of one forward pass tell each other."""

    tokens: Int[Tensor, "B T"]
    x0: Tensor | None = None  # the stream that enters block 0
    saved: dict[int, Tensor] = field(default_factory=dict)  # streams that a later part reads, by block
    values: dict[int, Tensor] = field(default_factory=dict)  # value embeddings, as wide as v, by block
    bands: dict[int, Tensor] = field(default_factory=dict)  # masks of sliding windows, by window
    start: int = 0  # the position of the first token: what stood before it is in `past`
    past: dict[Any, Tensor] | None = None  # None: nothing is kept for tokens to come
    penalties: list[Tensor] | None = field(default_factory=list)  # of the parts; None: taken, no more wanted

    def exchange(self, key: Any, value: Tensor) -> Tensor | None:
        """What was left under `key` by the tokens before these, None where there were none; `value` is left
        for the tokens to come.
        """
        if self.past is None:
            return None
        before = self.past.get(key)
        self.past[key] = value
        return before


class Block(nn.ModuleDict):
    """Sublayers by role (`attn`, `ffn`, `ffn_extra`), run in the order of `roles`, each joined to the stream
    by its residual.
    """

    def __init__(self, sublayers: dict[str, nn.Module], residual: dict[str, Residual]):
        super().__init__({**sublayers, "residual": nn.ModuleDict(residual)})
        self.roles = tuple(sublayers)

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context) -> Float[Tensor, "B T D"]:
        residual: Any = self["residual"]
        for role in self.roles:
            x = residual[role](x, self.branch(role, ctx))
        return x

    def branch(self, role: str, ctx: Context) -> Callable[[Tensor], Tensor]:
        """The sublayer as a function of the stream alone; attention reads the context (value embeddings), an
        FFN may add to it (penalties).
        """
        return partial(self[role] if role == "attn" else partial(feed, self[role]), ctx=ctx)


def feed(ffn: nn.Module, x: Tensor, ctx: Context) -> Tensor:
    """ffn(x), and what it wants besides goes to the context.

    Activation checkpointing calls it again in the backward pass, stops it half-way, and must find nothing
    that holds on to what was computed.
    """
    try:
        return ffn(x)
    finally:
        found = take(ffn)
        if ctx.penalties is not None:
            ctx.penalties += found


class ParallelBlock(Block):
    """c_a c_f x + s_a attn(norm_a x) + s_f ffn(norm_f x), scales s and carries c being 1 unless they are set:
    all sublayers read the same stream (PaLM, arXiv 2204.02311, section 2). Each keeps its norm; under a norm
    without parameters that is the shared norm of the paper.
    """

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context) -> Float[Tensor, "B T D"]:
        residual: Any = self["residual"]
        branches = [residual[role].branch(x, self.branch(role, ctx)) for role in self.roles]
        for role in self.roles:
            x = residual[role].carried(x)
        return sum(branches, x)


def run_block(block: Block, x: Tensor, ctx: Context) -> Tensor:
    """The plain way to run a block."""
    return block(x, ctx)


def run_block_checkpointed(block: Block, x: Tensor, ctx: Context) -> Tensor:
    """Activation checkpointing: keeps only the block's input and computes the rest again in the backward
    pass.
    """
    out = torch.utils.checkpoint.checkpoint(block, x, ctx, use_reentrant=False)
    assert isinstance(out, Tensor)
    return out


class GPT(nn.Module):
    """embed -> [parts.before, block, parts.after] x n_layers -> norm -> head.

    `parts` are what touches the stream between blocks (positions, skips, x0 lambdas, ...), in the order in
    which they act.
    """

    def __init__(
        self,
        settings: ModelSettings,
        *,
        vocab_size: int,
        blocks: list[Block],
        parts: dict[str, nn.Module],
        norm: nn.Module,
        embed: nn.Embedding,
        head: Head,
    ):
        super().__init__()
        self.settings = settings
        self.vocab_size = vocab_size
        self.seq_len, self.d_model, self.n_layers = settings.seq_len, settings.d_model, settings.n_layers
        self.embed = embed
        self.parts = nn.ModuleDict(parts)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head
        self.run_block: Callable[[Any, Tensor, Context], Tensor] = run_block

    def hidden(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """What the head reads."""
        return self.stream(tokens, Context(tokens))

    def follow(
        self, tokens: Int[Tensor, "B T"], past: dict[Any, Tensor], start: int
    ) -> Float[Tensor, "B T D"]:
        """What the head reads of tokens that stand at `start`, behind those that filled `past`: all at once
        at the start (past = {}), then one by one, each for the price of one token.
        """
        if start and tokens.shape[1] != 1:
            raise ValueError(f"expected one token behind the {start} before it, got {tokens.shape[1]}")
        return self.stream(tokens, Context(tokens, start=start, past=past))

    def stream(self, tokens: Int[Tensor, "B T"], ctx: Context) -> Float[Tensor, "B T D"]:
        """What the head reads; the parts tell each other by `ctx`."""
        parts: list[Any] = list(self.parts.values())
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            for part in parts:
                x = part.before(i, x, ctx)
            x = self.run_block(block, x, ctx)
            for part in parts:
                x = part.after(i, x, ctx)
        return self.norm(x)

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Logits in fp32; those of the padding are -inf unless `model.mask_padding=false`."""
        return self.head.logits(self.hidden(tokens))

    def loss(self, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        """Sum of the cross-entropy over all targets that are not -100, in nats; its gradient is also that of
        what the parts want besides (`nn.penalty`).
        """
        ctx = Context(tokens)
        loss = self.head.loss(self.stream(tokens, ctx).flatten(0, 1), targets.flatten())
        penalties, ctx.penalties = ctx.penalties or [], None
        return with_penalties(loss, penalties, targets)
