"""FFN weights that several layers share (E79)."""

from torch import nn

from ffnlab.nn.gpt import Block

SHARES = ("none", "all", "down")


def share_ffns(blocks: list[Block], what: str) -> None:
    """Make the FFNs of all layers hold the parameters of the first one that has them.

    `all`: every parameter, learned thresholds included; `down`: those of the way down. The modules stay one
    per layer, so that each layer is probed and its FLOPs counted; a parameter has a name in every layer and
    is stored, counted and trained once. A second FFN per block shares with the other second ones.
    """
    first: dict[str, nn.Module] = {}
    for block in blocks if what != "none" else []:
        for role in block.roles:
            if role != "attn":
                tie(block[role], first.setdefault(role, block[role]), what)


def tie(ffn: nn.Module, source: nn.Module, what: str) -> None:
    """Put parameters of `source` in the place of those of `ffn`, which has the same shape."""
    for name, parameter in source.named_parameters():
        path, _, last = name.rpartition(".")
        if what == "all" or "down" in path.split("."):
            setattr(ffn.get_submodule(path), last, parameter)
