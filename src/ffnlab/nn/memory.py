"""What training a model takes in memory, worked out without computing anything.

Inside `imagined()` tensors have shapes and types but no contents. A model built there is run forward once,
and what autograd keeps for the backward pass is added up; its optimizer is stepped once, and its state added
up. So a new variant or optimizer is counted without being declared. Left out is what lives for a moment: one
chunk of the head's logits and Muon's stacked matrices, up to 15 % of the sum in the runs measured.

The figures are bytes of tensors: what the allocator says to hold after a real forward pass agrees within 5 %
(tested). A process on a CPU takes more: its libraries, and pieces of freed memory that malloc keeps (resident
memory grew by 1.1 to 1.8 times the activations in ten runs of nano and micro models).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ffnlab.nn.gpt import GPT


@dataclass(frozen=True)
class Memory:
    """Bytes of each kind."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def imagined() -> AbstractContextManager:
    """Tensors made inside have shapes only: a model of any size is built in no memory."""
    return FakeTensorMode()


def estimate(
    model: GPT,
    optimizer: Any,
    *,
    batch_size: int,
    precision: Callable[[], AbstractContextManager],
    checkpointed: bool,
) -> Memory:
    """Training memory for batches of `batch_size` full windows; call it inside `imagined()`.

    `optimizer` holds torch optimizers as `.optimizers`; `precision` makes the autocast context of the forward
    pass; `checkpointed` says that every block keeps its input only.
    """
    weights = sum(p.nbytes for p in model.parameters())
    kept = activations(model, batch_size, precision)
    stream = batch_size * model.seq_len * model.d_model * 4
    if checkpointed:  # the inputs of all blocks, and one block that is computed again
        kept = model.n_layers * stream + kept // max(1, model.n_layers)
    # The head computes its gradients in the forward pass: that of its input waits with the activations.
    return Memory(weights, weights, optimizer_state(model, optimizer), kept + stream)


def activations(model: GPT, batch_size: int, precision: Callable[[], AbstractContextManager]) -> int:
    """Bytes that autograd keeps from embedding to final norm, each storage once, parameters left out."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor  # held, so that no other storage takes its place
        return tensor

    tokens = torch.zeros(batch_size, model.seq_len, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), precision():
        model.hidden(tokens)
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)


def optimizer_state(model: GPT, optimizer: Any) -> int:
    """Bytes of the optimizer's tensors after its first step."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = (state for inner in optimizer.optimizers for state in inner.state.values())
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))
