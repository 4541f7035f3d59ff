"""The gated linear unit."""

from ffnlab.nn.ffn.base import GatedFFN


class GLU(GatedFFN):
    """y = down(sigmoid(gate x) * up x) (Dauphin et al., arXiv 1612.08083). Parameters: 3 D F."""
