"""The ReLU-gated linear unit."""

from ffnlab.nn.ffn.base import GatedFFN


class ReGLU(GatedFFN):
    """y = down(ReLU(gate x) * up x) (Shazeer, arXiv 2002.05202, eq. 5). With gate = up it is ReLU^2."""
