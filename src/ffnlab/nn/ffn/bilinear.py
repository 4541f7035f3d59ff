"""The bilinear unit: a gate without an activation."""

from ffnlab.nn.ffn.base import GatedFFN


class Bilinear(GatedFFN):
    """y = down(gate x * up x) (Mnih & Hinton 2007; Shazeer, arXiv 2002.05202, eq. 5). Parameters: 3 D F."""
