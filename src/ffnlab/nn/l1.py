"""L1 regularisation of the hidden activations."""

import torch
from torch import nn

from ffnlab.nn.ffn.base import FFN
from ffnlab.nn.gpt import GPT, Block


class L1:
    """loss + c * mean over layers and tokens of sum_j |h_j|, h what `down` reads, before dropout.

    c = `coefficient` * min(1, update / `warmup`). Summed over the neurons and averaged over tokens and layers
    (an expert's neurons are 0 on the tokens of other experts; a second FFN in a block is another layer), as
    the code of Sakana AI's sparse FFNs does (R47); a mean over neurons would need c times d_ff.
    """

    def __init__(self, gpt: GPT, *, coefficient: float, warmup: int):
        self.coefficient, self.warmup = coefficient, warmup
        self.layers = sum(role != "attn" for block in gpt.blocks for role in roles(block))
        self.ffns = [module for module in gpt.modules() if isinstance(module, FFN)]
        device = next(gpt.parameters()).device
        for ffn in self.ffns:
            ffn.l1 = torch.zeros((), device=device)

    def __call__(self, update: int) -> None:
        """Set the coefficient of update `update`, counted from 1."""
        c = self.coefficient * (min(1.0, update / self.warmup) if self.warmup else 1.0)
        for ffn in self.ffns:
            assert ffn.l1 is not None
            ffn.l1.fill_(c / self.layers)


def roles(block: nn.Module) -> tuple[str, ...]:
    """The sublayers of a block."""
    assert isinstance(block, Block)
    return block.roles
