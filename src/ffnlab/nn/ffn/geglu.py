"""The GELU-gated linear unit."""

from ffnlab.nn.ffn.base import GatedFFN


class GEGLU(GatedFFN):
    """y = down(GELU(gate x) * up x) (Shazeer, arXiv 2002.05202, eq. 5). Parameters: 3 D F."""
