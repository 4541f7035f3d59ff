"""The probes that are not in the default set, on everything that a block can be made of."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ffnlab import build
from ffnlab.nn.gpt import run_block_checkpointed
from ffnlab.probe import Observer
from ffnlab.probe.base import layers
from ffnlab.probe.weights import vectors

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FFNS = sorted(path.stem for path in (CONFIGS / "ffn").glob("*.yaml") if path.stem != "none")
LIKE_ANOTHER = {"bilinear", "geglu", "reglu", "reglu2", "tied_reglu", "paired_init", "switch"}
PROBES = "probe=[activity,weights,top_tokens,coactivation,residual,attention,lambdas]"
BF16 = partial(torch.autocast, "cpu", torch.bfloat16)
PER_NEURON = ("weights/up_norm", "weights/down_norm", "weights/up_cosine", "top_tokens/value")


@pytest.mark.parametrize(
    "ffn", [pytest.param(ffn, marks=[pytest.mark.slow] if ffn in LIKE_ANOTHER else []) for ffn in FFNS]
)
def test_every_ffn_in_bf16(look, passed, ffn):
    """Every neuron has its numbers, and its vectors are what it multiplies by: x . row is its pre-activation,
    and alone it puts out its column.
    """
    options = [PROBES, f"ffn={ffn}", "ffn.extra=true", "model.n_layers=2"]
    gpt, tokens, _, seen, scan = look(*options, autocast=BF16)
    arrays = {**seen.arrays, **scan.arrays}
    scalars = {**seen.scalars, **scan.scalars}
    assert np.isfinite(list(scalars.values())).all()
    assert all(np.isfinite(array).all() for name, (array, _) in arrays.items() if "coactivation" not in name)
    for label, acts in layers(name for name, _ in gpt.named_modules()).items():
        active = arrays[f"{label}/activity_scan/active_frac"][0]
        assert {arrays[f"{label}/{name}"][0].shape[0] for name in PER_NEURON} == {len(active)}
        assert f"probe/weights/{label}/angle_deg" in scalars
        assert f"probe/residual/{label}/ffn_ratio" in scalars
        varies = ((active > 0) & (active < 1)).any()  # a sigmoid is above 0 on every token
        assert (f"probe/coactivation/{label}/mean_abs_phi" in scalars) == varies == (ffn != "glu")
        parts = [act.rpartition(".")[0] for act in acts]
        own = {part: vectors(gpt.get_submodule(part)) for part in parts}
        fronts = {part: "gate" if "gate" in own[part] else "up" for part in parts}
        held = passed(gpt, tokens, [*acts, *(f"{part}.{front}" for part, front in fronts.items())])
        for act, (part, front) in zip(acts, fronts.items(), strict=True):
            torch.testing.assert_close(held[f"{part}.{front}"][0] @ own[part][front].T, held[act][0])
            columns = gpt.get_submodule(f"{part}.down")(torch.eye(len(own[part]["down"])))
            torch.testing.assert_close(columns, own[part]["down"])


@pytest.mark.parametrize("absent", ["ffn", "attention"])
def test_without_a_sublayer(look, absent):
    *_, seen, scan = look(PROBES, f"{absent}=none", "model.order=parallel")
    kinds = {name.split("/")[1] for name in seen.scalars} | {name.split("/")[1] for name in scan.scalars}
    theirs = {"ffn": {"activity", "weights", "coactivation"}, "attention": {"attention"}}
    everything = {"activity", "weights", "coactivation", "attention", "residual"}
    assert kinds == everything - theirs[absent]


def test_nothing_of_the_model_is_touched_and_checkpointing_changes_nothing(look):
    gpt, tokens, mask, seen, scan = look(PROBES, "ffn=moe", "model.dropout=0.1")
    gpt.train()
    before = {name: value.clone() for name, value in gpt.state_dict().items()}
    modes = [module.training for module in gpt.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in gpt.modules()]
    random = torch.get_rng_state()
    cfg, _ = build.compose([PROBES])
    gpt.run_block = run_block_checkpointed
    watcher = Observer(
        gpt,
        build.probes(cfg),
        build.probe_settings(cfg),
        steps=10,
        batch=(tokens, mask),
        scan=tokens,
    )
    assert watcher.observe(0).scalars == seen.scalars
    assert watcher.scan(0).scalars == scan.scalars
    assert all(torch.equal(before[name], value) for name, value in gpt.state_dict().items())
    assert modes == [module.training for module in gpt.modules()]
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in gpt.modules()]
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in gpt.parameters())
