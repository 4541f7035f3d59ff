"""What a part wants besides a low cross-entropy: balanced experts, a small width, few active neurons."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class Penalised(nn.Module):
    """A module that may set `penalty` in a forward pass in training mode: nats per token, a mean over the
    tokens of the pass. The block takes it away right after the call, so that it is counted once for each
    call, also where activation checkpointing calls again.
    """

    penalty: Float[Tensor, ""] | None = None


def take(part: nn.Module) -> list[Tensor]:
    """The penalties that `part` and the modules in it have set; they are none afterwards."""
    found = []
    for module in part.modules():
        if isinstance(module, Penalised) and module.penalty is not None:
            found.append(module.penalty)
            module.penalty = None
    return found


def with_penalties(
    loss: Float[Tensor, ""], penalties: list[Tensor], targets: Int[Tensor, "..."]
) -> Float[Tensor, ""]:
    """`loss`, a sum over the counted targets, with the gradient of that sum plus the penalties as often.

    The value stays the cross-entropy alone, so that losses of all variants mean the same; a micro-batch
    weighs as much in the penalties as in the loss. Without penalties it is `loss` itself.
    """
    if not penalties:
        return loss
    extra = torch.stack([penalty.float() for penalty in penalties]).sum() * (targets >= 0).sum()
    return loss + (extra - extra.detach())
