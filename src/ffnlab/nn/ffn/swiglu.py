"""The SiLU-gated linear unit."""

from ffnlab.nn.ffn.base import GatedFFN


class SwiGLU(GatedFFN):
    """y = down(SiLU(gate x) * up x) (Shazeer, arXiv 2002.05202, eq. 5; Llama). Parameters: 3 D F."""
