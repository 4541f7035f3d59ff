"""ffnlab: a laboratory bench for the feed-forward half of the Transformer."""

from importlib.metadata import version

__version__ = version("ffnlab")
