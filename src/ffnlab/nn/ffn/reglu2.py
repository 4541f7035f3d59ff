"""The gated linear unit with a squared gate."""

from ffnlab.nn.ffn.base import GatedFFN


class ReGLU2(GatedFFN):
    """y = down(ReLU(gate x)^2 * up x): ReGLU (Shazeer, arXiv 2002.05202) with the activation of Primer (arXiv
    2109.08668) on its gate. Parameters: 3 D F.
    """
