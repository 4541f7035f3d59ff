"""The sublayer that is not there."""

from torch import nn


class Absent(nn.Module):
    """ffn=none or attention=none: build.py leaves the sublayer and its residual out of every block, so the
    stream passes unchanged and there is nothing to count, to probe or to train.
    """

    def __init__(self):
        super().__init__()
