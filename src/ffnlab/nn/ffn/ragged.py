"""Matrices for as many rows as there happen to be."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from ffnlab.nn.ffn.base import FFN

ROWS = 64


class RaggedLinear(nn.Linear):
    """A Linear for a number of rows (the tokens of an expert) that is another one in every call.

    In half precision on a CPU rows of zeros fill them up to a multiple of `ROWS`: oneDNN makes a kernel for
    every number of rows that it meets, which takes 10 times as long as the product (measured: 8 products of
    about 1000 rows, 128 x 256, bf16: 14.6 ms, of 1024 rows 0.8 ms). Rows without contents, where memory is
    estimated, get what any number of rows needs on average: half of `ROWS`.
    """

    def forward(self, x: Float[Tensor, "n ... i"]) -> Float[Tensor, "n ... o"]:
        missing = ROWS // 2 if is_fake(x) else -len(x) % ROWS
        if not missing or x.device.type != "cpu" or product_dtype(x).itemsize > 2:
            return super().forward(x)
        # cat and split, not pad and slice: their backward passes copy less.
        filled = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
        return super().forward(filled).split([len(x), missing])[0]


def ragged(ffn: FFN) -> FFN:
    """`ffn` with its matrices made for a varying number of rows; names and seeded draws stay as they are."""
    for name, part in list(ffn.named_children()):
        if isinstance(part, nn.Linear):
            own = RaggedLinear(part.in_features, part.out_features, bias=part.bias is not None)
            setattr(ffn, name, own)
    return ffn


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which a Linear multiplies x: autocast's, where that is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
