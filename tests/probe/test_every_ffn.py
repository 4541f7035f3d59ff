"""Every probe of the registry on every FFN of the registry; in half precision and checkpointed."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from ffnlab import build
from ffnlab.data.dataset import probe_mask
from ffnlab.nn.gpt import run_block_checkpointed
from ffnlab.probe import Observer

ROOT = Path(__file__).resolve().parents[2]
FFNS = sorted(path.stem for path in (ROOT / "configs/ffn").glob("*.yaml"))
LIKE_ANOTHER = {"bilinear", "geglu", "glu", "reglu", "reglu2", "tied_reglu", "paired_init", "switch"}
LIKE_ANOTHER |= {"multi", "paired", "low_rank"}  # like moe, dual_path, mlp; in bf16 in test_every_variant.py
PROBES = sorted(path.stem for path in (ROOT / "configs/probe").glob("*.yaml") if path.stem != "default")
TINY = ["model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.seq_len=8", "model.zero_out=false"]


def observed(*overrides: str, autocast=None, checkpointed: bool = False):
    """The model and what all probes show at an update and at a scan."""
    cfg, _ = build.compose([*TINY, f"probe=[{','.join(PROBES)}]", *overrides])
    model = build.model(cfg, 61)
    if checkpointed:
        model.run_block = run_block_checkpointed
    tokens = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[:, 1::2] = True
    options = {} if autocast is None else {"autocast": autocast}
    observer = Observer(
        model,
        build.probes(cfg),
        build.probe_settings(cfg),
        steps=4,
        batch=(tokens[:, :-1], mask),
        scan=tokens[:, :-1],
        **options,
    )
    size = observer.check_budget(scans=1)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    observer.on_gradients(1)
    return model, observer.observe(1), observer.scan(1), size


@pytest.mark.parametrize(
    "ffn", [pytest.param(ffn, marks=[pytest.mark.slow] if ffn in LIKE_ANOTHER else []) for ffn in FFNS]
)
def test_every_probe_on_every_ffn(ffn):
    """Finite numbers; as many neurons in every array of a layer as the FFNs have; sizes that are told."""
    model, seen, scanned, size = observed(f"ffn={ffn}")
    scalars = seen.scalars | scanned.scalars
    assert scalars
    assert all(math.isfinite(value) for value in scalars.values())
    arrays = seen.arrays | scanned.arrays
    assert size >= sum(array.nbytes for array, _ in arrays.values())
    for layer in range(2):
        modules = dict(model.blocks[layer].named_modules())
        neurons = sum(m.d_ff for name, m in modules.items() if hasattr(m, "up") and name.startswith("ffn"))
        sizes = {
            array.shape[dims.index("neuron")]
            for name, (array, dims) in arrays.items()
            if name.startswith(f"L{layer:02}/") and "neuron" in dims
        }
        assert sizes == ({neurons} if neurons else set())


@pytest.mark.slow
@pytest.mark.parametrize(("ffn", "dtype"), [("moe", torch.bfloat16), ("swiglu", torch.float16)])
def test_every_probe_in_half_precision_and_checkpointed(ffn, dtype):
    _, half, _, _ = observed(f"ffn={ffn}", autocast=partial(torch.autocast, "cpu", dtype), checkpointed=True)
    _, full, _, _ = observed(f"ffn={ffn}")
    assert half.scalars.keys() == full.scalars.keys()
    for name in ("probe/preact/L01/sd", "probe/activity/L01/active_frac"):
        assert half.scalars[name] == pytest.approx(full.scalars[name], rel=0.05)


@pytest.mark.filterwarnings("ignore:ffn.d_ff=3072 is given")
def test_the_record_of_a_large_run_is_small():
    """12 layers of 3072 neurons over 600 steps: under 300 MB before compression."""
    cfg, _ = build.compose(
        [*TINY, "model.n_layers=12", "ffn.d_ff=3072", "train.steps=600", "probe=default", "model.seq_len=64"]
    )
    tokens = torch.zeros(4, 64, dtype=torch.long)
    observer = Observer(
        build.model(cfg, 61),
        build.probes(cfg),
        build.probe_settings(cfg),
        steps=600,
        batch=(tokens, probe_mask(128, 4, 64)),
        scan=tokens,
    )
    sizes = observer.sizes(scans=8)
    looks, by_neuron = 21 + 58, 12 * 3072 * 4
    assert sizes["activity"] == (looks + 8) * by_neuron
    assert sizes["preact"] == looks * (2 * by_neuron + 12 * 120 * 4)
    assert sum(sizes.values()) < 300e6
