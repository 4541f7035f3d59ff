"""A forward pass of the probes' own, which leaves training bit-identical.

It runs in eval mode, without gradients, uncompiled, in the precision of the caller's autocast context, and
ends as soon as the last watched site was seen: the head is never computed. Random state, modes and hooks
are restored, also after an error.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ffnlab.probe.base import Site


class _SeenAll(Exception):  # not an error: the last hook ends the forward pass with it
    pass


@contextmanager
def aside(model: nn.Module, autocast: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """A place beside training: what the model runs here is not felt there."""
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    # Hooks on compiled code would make it compile anew; a variant may draw random numbers even in eval mode.
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices), torch.no_grad(), eager, autocast():
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def watch(
    model: nn.Module, tokens: Int[Tensor, "W T"], wanted: set[Site], see: Callable[[Site, Tensor], None]
) -> None:
    """One forward pass that hands each wanted site, as (W*T, neurons), to `see` and ends after the last one.

    A module that runs several times in one pass is seen the first time. No wanted site: no pass.
    A part that is called with some of the tokens only (an expert) says which by its second argument: their
    rows. On the others its neurons have no pre-activation (NaN) and put out nothing (0).
    """
    if not wanted:
        return
    pending = set(wanted)
    rows: dict[str, Tensor] = {}  # by name of the part that got them

    def note(part: str) -> Callable[..., None]:
        def run(_module: nn.Module, args: tuple) -> None:
            if len(args) > 1 and isinstance(args[1], Tensor):
                rows[part] = args[1]

        return run

    def hook(site: Site) -> Callable[..., None]:
        def run(_module: nn.Module, args: tuple, output: Tensor | None = None) -> None:
            if site in pending:
                pending.discard(site)
                value = args[0] if output is None else output
                see(site, _dense(site, value, tokens, rows.get(_parent(site.module))))
                if not pending:
                    raise _SeenAll

        return run

    with ExitStack() as hooks:
        for part in {_parent(site.module) for site in wanted}:
            hooks.callback(model.get_submodule(part).register_forward_pre_hook(note(part)).remove)
        for site in wanted:
            module = model.get_submodule(site.module)
            before = site.side == "input"
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            hooks.callback(register(hook(site)).remove)
        try:
            model(tokens)
        except _SeenAll:
            return


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def crop(
    tokens: Int[Tensor, "W T"], mask: Bool[Tensor, "W T"]
) -> tuple[Int[Tensor, "w t"], Bool[Tensor, "w t"]]:
    """Drops windows without a probed position and all positions after the last one: attention is causal."""
    reach = int(mask.any(0).nonzero().max()) + 1
    windows = mask.any(1)
    return tokens[windows, :reach], mask[windows, :reach]


def _dense(
    site: Site, value: Tensor, tokens: Int[Tensor, "W T"], rows: Int[Tensor, " n"] | None
) -> Float[Tensor, "N F"]:
    """(W, T, ..., F), (W*T, ..., F) or, with their `rows`, (n, F) -> (W*T, neurons)."""
    n = tokens.numel()
    if rows is not None:
        absent = torch.nan if site.side == "input" else 0.0
        return value.new_full((n, value.shape[-1]), absent).index_copy(0, rows, value)
    if value.shape[:2] == tokens.shape or value.shape[:1] == (n,):
        return value.reshape(n, -1)
    raise RuntimeError(
        f"the {site.side} of {site.module} has shape {tuple(value.shape)}; expected one row per token, "
        f"{tuple(tokens.shape)} in front, or a part that is called with the rows of its tokens."
    )
