"""What a model costs, read off its structure: parameters, bytes and FLOPs per token, by component.

Nothing is declared by a variant, so a new one is counted the day it is written:

- a parameter belongs to the component that its name says (`component`); one that has two names (a tied head)
  is counted once, at its first name;
- every `nn.Linear` costs 2 * in * out FLOPs per token wherever it is used, so a layer shared by two blocks
  costs twice what it stores; biases, norms, activations, gates and look-ups cost nothing (nanoGPT's sizing
  notebook);
- a module that only some tokens reach (experts) says their share as `token_share`, for it and all inside it:
  the FLOPs are those of an average token that is not dropped, and `active_parameters` those that it meets;
- attention (a module with matrices `q`, `k` and `out`) adds 2 * T * q.out for the scores and 2 * T * out.in
  for the weighted sum: 4 * T * d_model per token of a full window of T, causal or not (the same notebook).
  Shared keys and values (fewer outputs of `k` and `v`) make the projections cheaper, not these two. Where the
  module has a `window`, T is at most that: what the model needs, although a masked kernel may compute more.

The backward pass costs twice the forward pass, hence `TRAINING` = 3 forward passes a step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from torch import nn

COMPONENTS = ("embedding", "attention", "ffn", "norms", "head", "other")
TRAINING = 3


@dataclass(frozen=True)
class Cost:
    """Stored parameters, those of them that one token meets, bytes, and the forward FLOPs of one token."""

    parameters: int = 0
    flops_per_token: int = 0
    bytes: int = 0
    active_parameters: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.parameters + other.parameters,
            self.flops_per_token + other.flops_per_token,
            self.bytes + other.bytes,
            self.active_parameters + other.active_parameters,
        )


def component(name: str) -> str:
    """The component that a parameter or module name belongs to: `blocks.3.residual.ffn.norm.gain` is a norm,
    `blocks.3.residual.ffn.scale` is other, `blocks.3.ffn.act.threshold` is ffn."""
    parts = name.split(".")
    if any("norm" in part for part in parts):
        return "norms"
    if any("embed" in part or "position" in part for part in parts):
        return "embedding"
    if "residual" in parts:
        return "other"
    if any(part.startswith("ffn") for part in parts):
        return "ffn"
    if "attn" in parts:
        return "attention"
    return "head" if parts[0] == "head" else "other"


def count(model: nn.Module, seq_len: int) -> dict[str, Cost]:
    """The cost of every component, those that are absent as zero.

    `seq_len` is the window T that attention is charged for. Works on any device, `meta` included.
    """
    costs: dict[str, Cost] = {name: Cost() for name in COMPONENTS}
    shares = {name: share for name, _, share in walk(model)}
    for name, parameter in model.named_parameters():
        size, share = parameter.numel(), shares[name.rpartition(".")[0]]
        costs[component(name)] += Cost(
            parameters=size, bytes=size * parameter.element_size(), active_parameters=round(size * share)
        )
    for name, module, share in walk(model):
        costs[component(name)] += Cost(flops_per_token=round(module_flops(module, seq_len) * share))
    return costs


def flops(module: nn.Module) -> int:
    """FLOPs per token of a part without attention and of all inside it."""
    return sum(round(module_flops(inner, 0) * share) for _, inner, share in walk(module))


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, Fraction]]:
    """Name, module and share of the tokens that reach it, of every module wherever it is used."""
    shares: dict[str, Fraction] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        own = getattr(module, "token_share", Fraction(1))
        shares[name] = shares.get(name.rpartition(".")[0], Fraction(1)) * own if name else own
        yield name, module, shares[name]


def module_flops(module: nn.Module, seq_len: int) -> int:
    """FLOPs per token of this module alone, without the modules inside it."""
    if isinstance(module, nn.Linear):
        return 2 * module.in_features * module.out_features
    children = dict(module.named_children())
    q, k, out = (children.get(name) for name in ("q", "k", "out"))
    if isinstance(q, nn.Linear) and isinstance(k, nn.Linear) and isinstance(out, nn.Linear):
        seen = min(seq_len, getattr(module, "window", None) or seq_len)
        return 2 * seen * (q.out_features + out.in_features)
    return 0


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of several costs."""
    return sum(costs, Cost())


def tied(model: nn.Module) -> list[tuple[str, str]]:
    """(counted name, other name) of every parameter with two names, such as a head tied to the embedding."""
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        counted = first.setdefault(id(parameter), name)
        if counted != name:
            pairs.append((counted, name))
    return pairs
