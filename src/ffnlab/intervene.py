"""Changes to what the neurons of a model take in or put out, for as long as a question lasts.

A neuron's post-activation is the output of its activation module (of a gated unit: before it is multiplied by
`up`), found by name as the probes find it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.probe.base import layers

Change = Callable[[Tensor], Tensor]


def keep_largest(post: Tensor, frac: float) -> Tensor:
    """`post` with all but each token's round(frac * F) largest values by size set to 0."""
    k = max(1, round(frac * post.shape[-1]))
    kept = post.abs().topk(k, dim=-1).indices
    return torch.zeros_like(post).scatter(-1, kept, post.gather(-1, kept))


def drop_small(post: Tensor, eps: float) -> Tensor:
    """`post` with everything of at most this size set to 0."""
    return torch.where(post.abs() > eps, post, 0)


def lower(pre: Tensor, by: float) -> Tensor:
    """`pre` moved down, as a C that is higher by as much moves it."""
    return pre - by


def risen(losses: Tensor, base: Tensor) -> tuple[float, float, float]:
    """Mean loss, its rise over `base` on the same batches, and the standard error of the rise over the
    batches (NaN for one batch).
    """
    rise = losses - base
    error = rise.std().item() / math.sqrt(len(rise)) if len(rise) > 1 else math.nan
    return losses.mean().item(), rise.mean().item(), error


def acts(model: nn.Module) -> dict[str, list[str]]:
    """The activation modules by layer: {'L03': ['blocks.3.ffn.act']}."""
    return layers(name for name, _ in model.named_modules())


@contextmanager
def changed(
    model: nn.Module, changes: Mapping[str, Change], side: Literal["input", "output"]
) -> Iterator[None]:
    """Within it the first input, or the output, of each named module is what its change makes of it."""

    def on_input(change: Change) -> Callable[..., Any]:
        return lambda _module, args: (change(args[0]), *args[1:])

    def on_output(change: Change) -> Callable[..., Any]:
        return lambda _module, _args, output: change(output)

    with ExitStack() as stack:
        for name, change in changes.items():
            module = model.get_submodule(name)
            if side == "input":
                hook = module.register_forward_pre_hook(on_input(change))
            else:
                hook = module.register_forward_hook(on_output(change))
            stack.callback(hook.remove)
        yield


@contextmanager
def collected(
    model: nn.Module, names: list[str], side: Literal["input", "output"]
) -> Iterator[dict[str, list[Float[Tensor, "N F"]]]]:
    """Within it every pass adds what the named modules take in or put out, a row per token."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}

    def see(name: str) -> Change:
        def keep(values: Tensor) -> Tensor:
            seen[name].append(values.detach().flatten(0, -2))
            return values

        return keep

    with changed(model, {name: see(name) for name in names}, side):
        yield seen


class Activity:
    """Sums of the post-activations of every neuron while it is on, by activation module."""

    def __init__(self, model: nn.Module):
        self.model, self.acts = model, acts(model)
        self.tokens: dict[str, int] = {}
        self._sums: dict[str, Float[Tensor, "3 F"]] = {}  # not 0; size; value

    @contextmanager
    def on(self) -> Iterator["Activity"]:
        """To be entered after the changes that it shall see."""

        def see(name: str) -> Change:
            def add(post: Tensor) -> Tensor:
                rows = post.detach().flatten(0, -2)
                # added up in fp32: a sum in bf16 has two digits
                sizes = (kind.sum(0, dtype=torch.float32) for kind in (rows != 0, rows.abs(), rows))
                self._sums[name] = self._sums.get(name, 0) + torch.stack([*sizes]).cpu().double()
                self.tokens[name] = self.tokens.get(name, 0) + len(rows)
                return post

            return add

        names = (name for found in self.acts.values() for name in found)
        with changed(self.model, {name: see(name) for name in names}, "output"):
            yield self

    def fracs(self) -> dict[str, float]:
        """Share of the (token, neuron) pairs of each layer that are not 0, of those that were computed."""
        shares = {}
        for label, names in self.acts.items():
            met = [name for name in names if self.tokens.get(name)]
            pairs = sum(self.tokens[name] * self._sums[name].shape[1] for name in met)
            shares[label] = sum(self._sums[name][0].sum().item() for name in met) / max(pairs, 1)
        return shares

    def active_frac(self, name: str) -> Float[Tensor, " F"]:
        """Share of the tokens on which each neuron of a module is not 0."""
        return self._sums[name][0] / max(self.tokens[name], 1)

    def mean_size(self, name: str) -> Float[Tensor, " F"]:
        """Mean |post| of each neuron."""
        return self._sums[name][1] / max(self.tokens[name], 1)

    def mean(self, name: str) -> Float[Tensor, " F"]:
        """Mean post of each neuron."""
        return self._sums[name][2] / max(self.tokens[name], 1)
