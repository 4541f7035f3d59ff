"""What the probes see of experts and of a chosen width."""

import math

import numpy as np
import pytest
import torch

from ffnlab import build
from ffnlab.probe import Observer
from ffnlab.probe.base import layers

SMALL = [
    "model.n_layers=4",
    "model.d_model=32",
    "model.n_heads=2",
    "model.seq_len=16",
    "model.zero_out=false",
]


def make(*overrides: str):
    """A model and its configuration."""
    cfg, _ = build.compose([*SMALL, *overrides])
    return build.model(cfg, 97), cfg


def routed(gpt, tokens, layer: int):
    """By hand: the stream that enters a layer's FFN, and the experts chosen there (N, k)."""
    seen = []
    with gpt.blocks[layer]["ffn"].register_forward_pre_hook(lambda module, args: seen.append(args[0])):
        gpt.eval()(tokens)
    x = seen[0].flatten(0, 1)
    ffn = gpt.blocks[layer]["ffn"]
    return x, ffn, (x @ ffn.router.weight.T).topk(ffn.top_k).indices


@pytest.mark.parametrize("threshold", ["none", "learned"])
def test_neurons_of_experts_lie_one_expert_after_the_other(look, threshold):
    """Neuron e F + f is active on a token when the token went to expert e and f is active there."""
    gpt, tokens, mask, seen, scan = look("ffn=moe", f"threshold={threshold}")
    x, ffn, chosen = routed(gpt, tokens, 2)
    went = torch.stack([(chosen == e).any(1) for e in range(8)], dim=1)  # (N, E)
    pre = torch.stack([expert.up(x) for expert in ffn.experts], dim=1)  # (N, E, F)
    active = ((pre > 0) & went.unsqueeze(2)).flatten(1).float()
    rows = mask.flatten()
    array, dims = seen.arrays["L02/activity/active_frac"]
    assert dims == ("neuron",)
    torch.testing.assert_close(torch.from_numpy(array), active[rows].mean(0))
    torch.testing.assert_close(
        torch.from_numpy(scan.arrays["L02/activity_scan/active_frac"][0]), active.mean(0)
    )
    masked = torch.where(went.unsqueeze(2), pre, torch.nan).flatten(1)[rows]
    mean, _ = seen.arrays["L02/preact/mean"]
    torch.testing.assert_close(torch.from_numpy(mean), masked.nanmean(0), equal_nan=True)
    met = masked[~masked.isnan()]
    assert seen.scalars["probe/preact/L02/mean"] == pytest.approx(met.mean().item(), abs=1e-5)
    assert seen.scalars["probe/preact/L02/sd"] == pytest.approx(met.std(correction=0).item(), rel=1e-4)
    if threshold == "learned":
        assert seen.scalars["probe/threshold/L02/c"] == 0


@pytest.mark.parametrize("factor", ["null", "0.5"])
def test_load_is_that_of_the_probed_tokens_and_drops_are_those_of_their_windows(look, factor):
    gpt, tokens, mask, seen, _ = look("ffn=moe", f"ffn.capacity_factor={factor}")
    _, _, chosen = routed(gpt, tokens, 1)
    load, kept, all_kept = [0] * 8, 0, 0
    places = [[2] * 8 for _ in range(3)] if factor == "0.5" else [[99] * 8 for _ in range(3)]
    for n, (choice, probed) in enumerate(zip(chosen.tolist(), mask.flatten().tolist(), strict=True)):
        for e in choice:
            if places[n // 16][e] > 0:
                load[e] += probed
                kept += probed
                all_kept += 1
            places[n // 16][e] -= 1
    share = [count / kept for count in load]
    entropy = -sum(q * math.log(q) for q in share if q) / math.log(8)
    assert seen.scalars["moe/L01/load_entropy"] == pytest.approx(entropy, rel=1e-5)
    assert seen.scalars["moe/L01/dropped_frac"] == pytest.approx(1 - all_kept / chosen.numel())
    assert (seen.scalars["moe/L01/dropped_frac"] > 0) == (factor == "0.5")
    assert seen.arrays["L01/routing/load"][0].tolist() == pytest.approx(share)


def test_a_capacity_is_that_of_whole_windows(passed):
    """Cut off behind the last probed position, a window would give each expert a fourth of its places."""
    gpt, cfg = make("ffn=switch", "ffn.capacity_factor=0.7")
    tokens = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 16, dtype=torch.bool)
    mask[:, :4] = True
    observer = Observer(
        gpt, build.probes(cfg), build.probe_settings(cfg), steps=1, batch=(tokens, mask), scan=None
    )
    seen = observer.observe(0).arrays["L02/activity/active_frac"][0]
    acts = [f"blocks.2.ffn.experts.{e}.act" for e in range(8)]
    posts, rows = passed(gpt, tokens, acts), [[] for _ in acts]
    for expert, own in zip(gpt.get_submodule("blocks.2.ffn.experts").children(), rows, strict=True):
        expert.register_forward_pre_hook(lambda module, args, own=own: own.extend(args[1].tolist()))
    with torch.no_grad():
        gpt(tokens)
    probed = set(mask.flatten().nonzero().flatten().tolist())
    for e, act in enumerate(acts):
        mine = [i for i, row in enumerate(rows[e]) if row in probed]
        counts = (posts[act][1][mine] > 0).sum(0)
        width = len(counts)
        np.testing.assert_allclose(seen[e * width : (e + 1) * width], counts / 12, rtol=1e-6)


def test_width_and_the_neurons_beyond_it(look):
    gpt, tokens, mask, seen, _ = look("ffn=dynamic")
    shares, posts = [], []
    ffn = gpt.blocks[3]["ffn"]
    ffn.width.register_forward_hook(lambda module, args, out: shares.append(out))
    ffn.act.register_forward_hook(lambda module, args, out: posts.append(out))
    gpt.eval()(tokens)
    assert seen.scalars["ffn/L03/width_frac"] == pytest.approx(shares[0][mask].mean().item())
    kept = torch.arange(ffn.d_ff) < (shares[0][mask] * ffn.d_ff).round()
    assert not (posts[0][mask] > 0)[~kept].any()
    active = (posts[0][mask] > 0).float().mean(0)
    torch.testing.assert_close(torch.from_numpy(seen.arrays["L03/activity/active_frac"][0]), active)


def test_other_ffns_report_no_routing(look):
    seen = look("ffn=multi")[3]
    assert not [name for name in seen.scalars if name.startswith(("moe/", "ffn/"))]


def test_a_threshold_under_a_width_is_seen(look):
    gpt, _, _, seen, _ = look("ffn=dynamic", "threshold=learned", "threshold.init=0.3")
    assert layers(name for name, _ in gpt.named_modules())["L00"] == ["blocks.0.ffn.act"]
    assert seen.scalars["probe/threshold/L00/c"] == pytest.approx(0.3)


def test_second_ffns_have_labels_of_their_own(look):
    seen = look("ffn=moe", "ffn.extra=true")[3]
    assert {"moe/L02/load_entropy", "moe/L02_extra/load_entropy"} <= seen.scalars.keys()
