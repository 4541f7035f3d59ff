"""The head and its loss, computed in chunks of positions so that all logits never stand in memory at once.

Axes: N positions (batch x time), D d_model, V padded vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORED = -100  # a target that counts for nothing, as in torch.nn.functional.cross_entropy


class Head(nn.Linear):
    """logits = cap(W h), cap(z) = c tanh(z / c) or z; padded logits (index >= vocab_size) are -inf when
    `mask_padding`.

    W (V, D) has no bias and may be the embedding's parameter (`model.tie_head`).
    """

    def __init__(
        self, d_model: int, padded_vocab: int, *, vocab_size: int, softcap: float | None, mask_padding: bool
    ):
        super().__init__(d_model, padded_vocab, bias=False)
        self.softcap = softcap
        self.n_valid = vocab_size if mask_padding else padded_vocab
        self.imagined_on: str | None = None  # a kind of device, where only memory is asked for (nn.memory)

    def logits(self, h: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        """All logits in fp32, for sampling and for small inputs."""
        z = F.linear(h, self.weight).float()
        z = z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)
        return z if self.n_valid == z.shape[-1] else mask_from(z, self.n_valid)

    def loss(self, h: Float[Tensor, "N D"], targets: Int[Tensor, " N"]) -> Float[Tensor, ""]:
        """Sum of -log softmax(logits)[target] in nats over the targets that are not -100."""
        dtype = (
            torch.get_autocast_dtype(h.device.type) if torch.is_autocast_enabled(h.device.type) else h.dtype
        )
        rows = chunk_rows(self.weight.shape[0], self.imagined_on or h.device.type)
        stop = min(2 * rows, len(h)) if self.imagined_on else len(h)  # each chunk takes as much memory
        options = (self.softcap, self.n_valid, dtype, rows, stop)
        return ChunkedCrossEntropy.apply(h, self.weight, targets, *options)


def mask_from(z: Tensor, n_valid: int) -> Tensor:
    """-inf from column n_valid on."""
    return torch.cat([z[..., :n_valid], torch.full_like(z[..., n_valid:], -torch.inf)], dim=-1)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of softcapped logits whose gradients are made in the forward pass, chunk by chunk.

    Memory for logits: one chunk instead of N x V. Matrix products in `dtype` with fp32 softmax and fp32 sums
    over chunks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        targets: Tensor,
        softcap: float | None,
        n_valid: int,
        dtype: torch.dtype,
        rows: int,
        stop: int,
    ) -> Tensor:
        need_h, need_w = ctx.needs_input_grad[:2]
        h_low, w_low = h.to(dtype), weight.to(dtype)
        grad_h = torch.empty_like(h) if need_h else None
        grad_w = torch.zeros_like(weight, dtype=torch.float32) if need_w else None
        total = torch.zeros((), dtype=torch.float32, device=h.device)
        for start in range(0, stop, rows):
            part = slice(start, start + rows)
            loss, grad = chunk(h_low[part] @ w_low.T, targets[part], softcap, n_valid, need_h or need_w)
            total += loss
            if grad is not None:
                grad = grad.to(dtype)
                if grad_h is not None:
                    grad_h[part] = grad @ w_low
                if grad_w is not None:
                    grad_w += grad.T @ h_low[part]
        ctx.save_for_backward(grad_h, grad_w)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_w = ctx.saved_tensors
        out_h = None if grad_h is None else (grad_h * grads[0]).to(grad_h.dtype)
        out_w = None if grad_w is None else (grad_w * grads[0]).to(ctx.weight_dtype)
        return out_h, out_w, None, None, None, None, None, None


def chunk_rows(vocab: int, device: str) -> int:
    """Positions per chunk: fp32 logits of about 8 MiB on a CPU (cache), 512 MiB elsewhere."""
    return max(64, (2**21 if device == "cpu" else 2**27) // vocab)


def chunk(
    z: Tensor, targets: Tensor, softcap: float | None, n_valid: int, need_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Loss of one chunk and its gradient by the raw logits z (n, V): (softmax - onehot) * (1 - tanh^2)."""
    raw = z.float()
    capped = raw if softcap is None else raw.div(softcap).tanh_().mul_(softcap)
    if n_valid < capped.shape[1]:
        capped[:, n_valid:] = -torch.inf
    counted = (targets != IGNORED).to(capped.dtype).unsqueeze(1)
    index = targets.clamp(min=0).unsqueeze(1)
    top = capped.amax(dim=1, keepdim=True)
    hit = capped.gather(1, index)
    unscaled = (capped - top).exp_()  # one exponential serves the loss and the gradient
    norm = unscaled.sum(dim=1, keepdim=True)
    loss = ((norm.log() + top - hit) * counted).sum()
    if not need_grad:
        return loss, None
    grad = unscaled.mul_(counted / norm)
    grad.scatter_add_(1, index, -counted)
    if softcap is not None:
        slope = capped.div_(softcap).square_().neg_().add_(1)
        slope[:, n_valid:] = 0
        grad.mul_(slope)
    return loss, grad
