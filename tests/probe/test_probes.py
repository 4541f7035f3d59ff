"""Every probe against its formula written out on a whole forward pass."""

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from ffnlab.errors import UserError
from ffnlab.nn.act.gelu import GELU
from ffnlab.nn.ffn.swiglu import SwiGLU
from ffnlab.nn.threshold import FixedThreshold, LearnedThreshold, calibrate
from ffnlab.probe.activity import Activity, count, gini, is_active
from ffnlab.probe.base import Captured, Site
from ffnlab.probe.crossings import Crossings
from ffnlab.probe.gates import Gates
from ffnlab.probe.preact import Preact
from ffnlab.probe.threshold import Threshold

LAYERS = ["L00", "L01", "L02", "L03"]


def activity() -> dict[str, Activity]:
    return {"activity": Activity(every=1, eps=0.01, bins=10)}


def preact(eps: float = 0.1, bins: int = 12) -> dict[str, Preact]:
    return {"preact": Preact(every=1, eps=eps, low=-3.0, high=3.0, bins=bins)}


def pre(model, tokens: Tensor, layer: int) -> Tensor:
    """up (or gate) of what the layer's residual hands to its FFN, (B, T, F)."""
    seen = []
    ffn = model.blocks[layer]["ffn"]
    hook = ffn.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model.eval()(tokens)
        hook.remove()
        return (ffn.gate if hasattr(ffn, "gate") else ffn.up)(seen[0])


def test_active_fraction_on_the_probe_batch(gpt, observer, batch):
    model = gpt()
    seen = observer(model, activity()).observe(0)
    for layer, label in enumerate(LAYERS):
        expected = (pre(model, batch[0], layer)[batch[1]] > 0).double().mean(0)
        array, dims = seen.arrays[f"{label}/activity/active_frac"]
        assert dims == ("neuron",)
        assert array.shape == (40,)
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, expected)
        assert seen.scalars[f"probe/activity/{label}/active_frac"] == pytest.approx(expected.mean().item())
    assert len(seen.arrays) == 4


def test_measures_of_sparsity_side_by_side(gpt, observer, batch):
    model = gpt(bias=frozenset({"up"}))
    with torch.no_grad():
        model.blocks[1]["ffn"].up.bias[:7] = -100.0
    seen = observer(model, activity()).observe(0)
    post = pre(model, batch[0], 1)[batch[1]].relu().square()
    expected = {"zero_frac": post == 0, "above_eps_frac": post > 0.01, "used_frac": (post > 0).any(0)}
    for name, where in expected.items():
        value = seen.scalars[f"probe/activity/L01/{name}"]
        assert value == pytest.approx(where.double().mean().item())
    assert seen.scalars["probe/activity/L01/used_frac"] <= 33 / 40


def test_half_of_the_neurons_are_active_at_the_start(gpt, observer, scan):
    """E46: a neuron without bias splits the sphere in halves."""
    seen = observer(gpt(), activity(), scan=scan.repeat(4, 1)).scan(0)
    means = [seen.arrays[f"{label}/activity_scan/active_frac"][0].mean() for label in LAYERS]
    assert np.mean(means) == pytest.approx(0.5, abs=0.05)


def test_dead_and_always_on_neurons_of_the_scan(gpt, observer, scan):
    model = gpt(bias=frozenset({"up"}))
    with torch.no_grad():
        model.blocks[2]["ffn"].up.bias[:3] = -100.0
        model.blocks[2]["ffn"].up.bias[3:8] = 100.0
    seen = observer(model, activity()).scan(0)
    active = (pre(model, scan, 2) > 0).flatten(0, 1).double().mean(0).numpy()
    np.testing.assert_allclose(seen.arrays["L02/activity_scan/active_frac"][0], active, rtol=1e-6)
    assert seen.scalars["probe/activity/L02/dead_frac"] == (active == 0).mean() >= 3 / 40
    assert seen.scalars["probe/activity/L02/always_on_frac"] == (active == 1).mean() >= 5 / 40
    counts, edges = seen.histograms["probe/activity/L02/active_frac_hist"]
    np.testing.assert_allclose(edges, np.linspace(0, 1, 11))
    assert counts.sum() == 40
    assert counts[0] == (active < 0.1).sum()
    assert counts[-1] == (active >= 0.9).sum()
    used = (pre(model, scan, 2) > 0).any(1).double().mean().item()  # of (window, neuron) pairs
    assert seen.scalars["probe/activity/L02/used_seq_frac"] == pytest.approx(used)
    differences = np.abs(active[:, None] - active).mean() / (2 * active.mean())
    assert seen.scalars["probe/activity/L02/gini"] == pytest.approx(differences)


def test_a_scan_counted_by_hand():
    """Two windows of two tokens; neurons active on all tokens, on all but one, on one, on none."""
    probe = Activity(every=1, eps=0.01, bins=4)
    act = "blocks.0.ffn.act"
    probe.watch([act])
    _, scanner = probe.scanner(torch.nn.Identity())
    scanner.seq_len = 2
    rows = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0]]).float()
    for start in (0, 2):
        scanner.see(Site(act, "output"), rows[start : start + 2], start)
    found = scanner.result()
    names = ("dead_frac", "always_on_frac", "used_seq_frac")
    assert [found.scalars[f"probe/activity/L00/{name}"] for name in names] == [1 / 4, 1 / 4, 5 / 8]
    assert found.arrays["L00/activity_scan/active_frac"][0].tolist() == [1, 0.75, 0.25, 0]
    assert found.histograms["probe/activity/L00/active_frac_hist"][0].tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_counting_by_bits_is_counting(dtype):
    """Signed zeros, the smallest numbers of either sign, more rows than a byte can count."""
    tiny = torch.finfo(dtype).smallest_normal
    post = torch.tensor([0.0, -0.0, tiny, -tiny, 3.0, -3.0, torch.inf], dtype=dtype).repeat(700, 1)
    assert count(is_active(post)).tolist() == [0, 0, 700, 0, 700, 0, 700]
    assert torch.equal(count(is_active(post.T)), (post.T > 0).sum(0))


@pytest.mark.parametrize(("counts", "expected"), [([5, 5, 5], 0.0), ([0, 0, 0, 9], 0.75), ([0, 0], 0.0)])
def test_gini(counts, expected):
    assert gini(np.array(counts)) == pytest.approx(expected)


def test_smooth_activations_have_a_second_measure(gpt, observer, batch):
    """GELU: positive outputs are those of positive inputs; |post| > eps says how many are far from zero."""
    model = gpt(act=lambda n: GELU(d_ff=n))
    seen = observer(model, activity()).observe(0)
    for layer, label in enumerate(LAYERS):
        x = pre(model, batch[0], layer)[batch[1]]
        post = torch.nn.functional.gelu(x)
        expected = {"active_frac": x > 0, "above_eps_frac": post.abs() > 0.01}
        for name, where in expected.items():
            value = seen.scalars[f"probe/activity/{label}/{name}"]
            assert value == pytest.approx(where.double().mean().item())


def test_gated_ffn_counts_its_gate(gpt, observer, batch):
    model = gpt(ffn=SwiGLU)
    seen = observer(model, activity() | preact()).observe(0)
    gate = pre(model, batch[0], 1)[batch[1]]
    assert seen.scalars["probe/activity/L01/active_frac"] == pytest.approx((gate > 0).double().mean().item())
    assert seen.scalars["probe/preact/L01/mean"] == pytest.approx(gate.mean().item(), abs=1e-6)


FIXED, OWN = (FixedThreshold(init=0.3, active_frac=None, scope=scope) for scope in ("layer", "neuron"))


@pytest.mark.parametrize("threshold", [None, FIXED, OWN])
def test_preactivation_moments_before_c(gpt, observer, batch, threshold):
    model = gpt(threshold=threshold)
    seen = observer(model, preact()).observe(0)
    for layer, label in enumerate(LAYERS):
        x = pre(model, batch[0], layer)[batch[1]].double()
        expected = [x.mean().item(), x.std(correction=0).item(), scipy.stats.kurtosis(x, None, fisher=False)]
        scalars = [seen.scalars[f"probe/preact/{label}/{name}"] for name in ("mean", "sd", "kurtosis")]
        assert scalars == pytest.approx(expected, rel=1e-4, abs=1e-6)
        np.testing.assert_allclose(seen.arrays[f"{label}/preact/mean"][0], x.mean(0), rtol=1e-4, atol=1e-6)
        sd = x.std(0, correction=0)
        np.testing.assert_allclose(seen.arrays[f"{label}/preact/sd"][0], sd, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("threshold", [None, FIXED, OWN])
def test_what_lies_at_the_threshold(gpt, observer, batch, threshold):
    model = gpt(threshold=threshold)
    if threshold is OWN:
        with torch.no_grad():
            model.blocks[1]["ffn"].act.threshold.copy_(torch.linspace(-0.5, 0.5, 40))
    seen = observer(model, preact(eps=0.2)).observe(0)
    x = pre(model, batch[0], 1)[batch[1]].double()
    above = x - (0.0 if threshold is None else model.blocks[1]["ffn"].act.threshold.double())
    expected = {
        "active_frac": (above > 0).double().mean().item(),
        "below_frac": ((above >= -0.2) & (above < 0)).double().mean().item(),
        "above_frac": ((above > 0) & (above <= 0.2)).double().mean().item(),
        "predicted_active_frac": scipy.stats.norm.sf(0, above.mean(), above.std(correction=0)),
    }
    found = {name: seen.scalars[f"probe/preact/L01/{name}"] for name in expected}
    assert found == pytest.approx(expected, rel=1e-5)
    hist, dims = seen.arrays["L01/preact/hist"]
    clipped = x.clamp(-2.999, 2.999)  # what lies beyond counts in the first and the last bin
    assert dims == ("bin",)
    assert hist.dtype == np.int32
    np.testing.assert_array_equal(hist, np.histogram(clipped, np.linspace(-3, 3, 13))[0])


def test_at_c_and_beyond_the_histogram_in_bf16():
    """C = 0.3 is 0.3008 in bf16, as the forward pass subtracts it; a pre-activation at C is not active."""
    act = LearnedThreshold(init=0.3, active_frac=None, scope="neuron")(torch.nn.ReLU(), 4)
    block = torch.nn.ModuleDict({"ffn": torch.nn.ModuleDict({"act": act})})
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block])})
    pre = torch.tensor([[0.3008, 9.0, -9.0, 0.25], [0.5, 3.0, -3.0, 0.3]]).bfloat16()
    active = (act(pre) > 0).float().mean().item()
    site, places = Site("blocks.0.ffn.act", "input"), torch.arange(2)
    captured = Captured(tokens=places, rows=places, values={site: pre})
    probes = preact()["preact"], Crossings(every=1)
    for probe in probes:
        probe.watch([site.module])
    seen, crossed = (probe.read(captured, model) for probe in probes)
    assert active == 3 / 8
    names = ("active_frac", "below_frac", "above_frac")
    assert [seen.scalars[f"probe/preact/L00/{name}"] for name in names] == [active, 1 / 8, 0]
    assert crossed.scalars["probe/crossings/L00/ever_active_frac"] == active
    assert seen.arrays["L00/preact/hist"][0].tolist() == [2, 0, 0, 0, 0, 0, 3, 1, 0, 0, 0, 2]


def test_normal_preactivations_are_predicted(gpt, observer, scan):
    """1 - Phi(c / s) at the start, where pre-activations are normal (E27), against the measured share."""
    model = gpt(threshold=FIXED)
    mask = torch.ones_like(scan, dtype=torch.bool)
    seen = observer(model, preact(), batch=(scan, mask)).observe(0)
    for label in LAYERS:
        measured, predicted = (
            seen.scalars[f"probe/preact/{label}/{name}"] for name in ("active_frac", "predicted_active_frac")
        )
        assert predicted == pytest.approx(measured, abs=0.03)


def test_a_threshold_lowers_activity_not_preactivations(gpt, observer, batch):
    model = gpt(threshold=FixedThreshold(init=0.3, active_frac=None, scope="layer"))
    seen = observer(model, activity()).observe(0)
    expected = (pre(model, batch[0], 0)[batch[1]] > 0.3).double().mean().item()
    assert seen.scalars["probe/activity/L00/active_frac"] == pytest.approx(expected)


def test_calibrated_threshold_gives_its_active_fraction(gpt, observer, scan):
    """E27: the share that was asked for, on the tokens that it was set on."""
    model = gpt(threshold=LearnedThreshold(init=0.0, active_frac=0.3, scope="layer"))
    calibrate(model, scan)
    seen = observer(model, activity()).scan(0)
    for label in LAYERS:
        assert seen.arrays[f"{label}/activity_scan/active_frac"][0].mean() == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("maker", [FixedThreshold, LearnedThreshold])
@pytest.mark.parametrize("scope", ["layer", "model", "neuron"])
def test_threshold_by_layer(gpt, observer, maker, scope):
    model = gpt(threshold=maker(init=0.25, active_frac=None, scope=scope))
    with torch.no_grad():
        model.blocks[1]["ffn"].act.threshold.fill_(0.5)
    seen = observer(model, {"threshold": Threshold(every=1)}).observe(0)
    others = 0.5 if scope == "model" and maker is LearnedThreshold else 0.25
    assert [seen.scalars[f"probe/threshold/{label}/c"] for label in LAYERS] == [others, 0.5, others, others]
    assert (len(seen.scalars), len(seen.arrays)) == ((16, 4) if scope == "neuron" else (4, 0))


def test_threshold_per_neuron(gpt, observer):
    model = gpt(threshold=LearnedThreshold(init=0.0, active_frac=None, scope="neuron"))
    c = torch.arange(40) / 40
    with torch.no_grad():
        model.blocks[3]["ffn"].act.threshold.copy_(c)
    seen = observer(model, {"threshold": Threshold(every=1)}).observe(0)
    np.testing.assert_array_equal(seen.arrays["L03/threshold/c"][0], c)
    names = [f"probe/threshold/L03/{name}" for name in ("c", "c_sd", "c_min", "c_max")]
    expected = [c.mean().item(), c.std(correction=0).item(), 0.0, 39 / 40]
    assert [seen.scalars[name] for name in names] == pytest.approx(expected)


def test_no_threshold_reports_nothing(gpt, observer):
    assert not observer(gpt(), {"threshold": Threshold(every=1)}).observe(0).scalars


def test_gates_and_lambdas(gpt, observer):
    model = gpt(scale="learned")
    with torch.no_grad():
        model.parts["skip"].gate_01_02.fill_(2.0)
        model.parts["x0_lambdas"].lambdas[3] = torch.tensor([0.9, -0.1])
        model.blocks[2]["residual"]["ffn"].scale.fill_(0.8)
    seen = observer(model, {"gates": Gates(every=1)}).observe(0)
    expected = {f"probe/lambdas/{label}/x": 1.0 for label in LAYERS}
    expected |= {f"probe/lambdas/{label}/x0": 0.0 for label in LAYERS}
    expected |= {f"probe/gates/{label}/residual_{role}": 1.0 for label in LAYERS for role in ("attn", "ffn")}
    expected |= {
        "probe/gates/skip_01_02/value": 1 / (1 + np.exp(-2.0)),
        "probe/gates/backout/value": 0.25,
        "probe/gates/smear/value": 0.0,
        "probe/lambdas/L03/x": 0.9,
        "probe/lambdas/L03/x0": -0.1,
        "probe/gates/L02/residual_ffn": 0.8,
    }
    assert seen.scalars == pytest.approx(expected)
    assert not seen.arrays


def test_layerscale_and_carry(gpt, observer):
    model = gpt(scale="layerscale", carry="learned")
    with torch.no_grad():
        model.blocks[2]["residual"]["ffn"].scale.copy_(torch.arange(16) / 15)
        model.blocks[1]["residual"]["attn"].carry.fill_(0.9)
    seen = observer(model, {"gates": Gates(every=1)}).observe(0)
    names = ("L02/residual_ffn", "L01/residual_attn", "L01/residual_attn_carry", "L02/residual_ffn_carry")
    assert [seen.scalars[f"probe/gates/{name}"] for name in names] == pytest.approx([0.5, 1.0, 0.9, 1.0])
    array, dims = seen.arrays["gates/L02/residual_ffn"]
    np.testing.assert_allclose(array, np.arange(16) / 15, rtol=1e-6)
    assert dims == ("channel",)


def test_vector_gates_keep_every_channel(gpt, observer):
    seen = observer(gpt(gate="vector"), {"gates": Gates(every=1)}).observe(0)
    array, dims = seen.arrays["gates/skip_01_02/value"]
    assert dims == ("channel",)
    np.testing.assert_allclose(array, np.full(16, 1 / (1 + np.exp(1.5))), rtol=1e-6)
    assert seen.scalars["probe/gates/skip_01_02/value"] == pytest.approx(array.mean())


@pytest.mark.parametrize("changes", [{"every": 0}, {"eps": -1.0}, {"bins": 0}])
def test_bad_options(changes):
    with pytest.raises(UserError, match=r"probe\.activity\."):
        Activity(**{"every": 1, "eps": 0.01, "bins": 10, **changes})


@pytest.mark.parametrize("changes", [{"eps": 0.0}, {"bins": 0}, {"low": 3.0}])
def test_bad_options_of_preact(changes):
    with pytest.raises(UserError, match=r"probe\.preact\."):
        Preact(**{"every": 1, "eps": 0.1, "low": -3.0, "high": 3.0, "bins": 10, **changes})
