"""How widely each head looks."""

import re
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ffnlab.probe.base import Captured, Observation, Probe, Site, to_numpy

ATTENTION = re.compile(r"blocks\.(\d+)\.attn")


class Attention(Probe):
    """The distribution p of a query over the keys that it sees, p = softmax(s q k^T), of each head at each
    probed position; every number is a mean over the positions that it is defined at.

    The arrays `L03/attention/<name> (head)`, with the mean over heads as `probe/attention/L03/<name>`:
    - `entropy`: -sum p ln p in nats, 0 for one key, at most ln n for n keys that are seen.
    - `entropy_frac`: entropy / ln n, at positions that see more than one key.
    - `sink_frac`: p of the first token of the window, at positions after it that see it.
    A number that is defined nowhere (all positions see themselves only) is left out.

    q and k are the model's own, normalised and rotated: `queries_keys` of the attention module, which also
    says its `window` and `scale`. Product and softmax are done anew in fp32, since the model's fused kernel
    shows no p. Attention without that method is not reported.
    """

    def __init__(self, *, every: int):
        super().__init__(every=every)
        self.layers: dict[str, str] = {}

    def watch(self, names: list[str]) -> list[Site]:
        self.layers = {f"L{int(match[1]):02d}": n for n in names if (match := ATTENTION.fullmatch(n))}
        return [Site(name, "input", whole=True) for name in self.layers.values()]

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        seen, rows = Observation(), captured.rows
        assert rows is not None
        for label, name in self.layers.items():
            attn: Any = model.get_submodule(name)
            if not hasattr(attn, "queries_keys"):
                continue
            q, k = attn.queries_keys(captured.values[Site(name, "input", whole=True)])
            n = q.shape[2]
            sees = q.new_ones(n, n, dtype=torch.bool).tril().triu(1 - (attn.window or n))
            p = distribution(q, k, sees, attn.scale or q.shape[3] ** -0.5, rows)
            for key, value in by_head(p, sees, rows % n).items():
                seen.arrays[f"{label}/attention/{key}"] = (to_numpy(value), ("head",))
                seen.scalars[f"probe/attention/{label}/{key}"] = value.mean().item()
        return seen


def distribution(
    q: Float[Tensor, "W H T K"],
    k: Float[Tensor, "W G T K"],
    sees: Bool[Tensor, "T T"],
    scale: float,
    rows: Int[Tensor, " N"],
) -> Float[Tensor, "N H T"]:
    """p of the positions `rows` of the windows when they are counted through, window by window."""
    window, place = rows // q.shape[2], rows % q.shape[2]
    parts = []
    with torch.autocast(q.device.type, enabled=False):
        for w in window.unique():
            at = place[window == w]
            asked = q[w, :, at].float().unflatten(0, (k.shape[1], -1))  # (G, H/G, n, K)
            scores = scale * asked @ k[w].float().unsqueeze(1).mT  # (G, H/G, n, T)
            parts.append(scores.masked_fill(~sees[at], -torch.inf).softmax(-1).flatten(0, 1))
    return torch.cat(parts, dim=1).transpose(0, 1)


def by_head(
    p: Float[Tensor, "N H T"], sees: Bool[Tensor, "T T"], place: Int[Tensor, " N"]
) -> dict[str, Float[Tensor, " H"]]:
    """The numbers of `Attention`, of each head."""
    entropy, n = torch.special.entr(p).sum(-1), sees.sum(1)[place]
    wide, sink = n > 1, sees[place, 0] & (place > 0)
    found = {"entropy": entropy.mean(0)}
    if wide.any():
        found["entropy_frac"] = (entropy[wide] / n[wide].log().unsqueeze(1)).mean(0)
    if sink.any():
        found["sink_frac"] = p[sink, :, 0].mean(0)
    return found
