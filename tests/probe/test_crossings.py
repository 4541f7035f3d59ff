"""Traces and crossings against each other and against counting by hand."""

import numpy as np
import pytest
import torch

from ffnlab.errors import UserError
from ffnlab.nn.threshold import FixedThreshold
from ffnlab.probe.base import Captured, Site
from ffnlab.probe.crossings import Crossings
from ffnlab.probe.trace import Trace

ACT = "blocks.0.ffn.act"


def test_trace_is_the_preactivation_of_the_chosen_layers(gpt, observer, batch):
    model = gpt(threshold=FixedThreshold(init=0.3, active_frac=None, scope="layer"))
    seen = observer(model, {"trace": Trace(every=1, layers=[2])}).observe(0)
    inputs = []
    with model.blocks[2]["ffn"].up.register_forward_hook(lambda module, args, out: inputs.append(out)):
        model.eval()(batch[0])
    ((name, (array, dims)),) = seen.arrays.items()
    assert name == "L02/trace/preact"
    assert dims == ("token", "neuron")
    assert array.dtype == np.float16
    want = inputs[0][batch[1]].detach().half()  # of another pass, whose last bit may round the other way
    np.testing.assert_allclose(array, want, rtol=2e-3, atol=1e-6)


def test_trace_takes_the_first_and_the_last_layer_with_an_ffn():
    names = [f"blocks.{i}.ffn.act" for i in (1, 2, 3)] + ["blocks.3.ffn_extra.act"]
    probe = Trace(every=1, layers=None)
    probe.watch(names)
    assert list(probe.layers) == ["L01", "L03", "L03_extra"]
    with pytest.raises(UserError, match=r"\[0, 7\]; expected layers with an FFN: \[1, 2, 3\]"):
        Trace(every=1, layers=[0, 2, 7]).watch(names)
    assert Trace(every=1, layers=None).watch([]) == []


def looks(*on: list[list[int]]):
    """What the probe returns, look after look, for the truth tables (token, neuron) of a model without C."""
    probe = Crossings(every=1)
    probe.watch([ACT])
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.ModuleDict()])})
    model.blocks[0]["ffn"] = torch.nn.ModuleDict({"act": torch.nn.ReLU()})  # pyright: ignore
    for table in on:
        pre = torch.where(torch.tensor(table).bool(), 1.0, -1.0)
        places = torch.arange(len(table))
        yield probe.read(Captured(tokens=places, rows=places, values={Site(ACT, "input"): pre}), model)


def test_crossings_by_hand():
    """Two tokens, three neurons, four looks."""
    tables = [[1, 0, 0], [1, 0, 0]], [[0, 0, 0], [1, 1, 0]], [[0, 0, 0], [0, 0, 0]], [[1, 0, 0], [0, 1, 0]]
    first, second, third, last = looks(*map(list, tables))

    def arrays(seen, name):
        return seen.arrays[f"L00/crossings/{name}"][0].tolist()

    def scalar(seen, name):
        return seen.scalars.get(f"probe/crossings/L00/{name}")

    assert arrays(first, "ever_active_frac") == [1, 0, 0]
    assert arrays(first, "flips_mean") == [0, 0, 0]
    assert np.isnan(arrays(first, "on_off_rate") + arrays(first, "off_on_rate")).all()
    assert scalar(first, "on_off_rate") is None
    assert scalar(first, "ever_active_frac") == pytest.approx(2 / 6)
    np.testing.assert_array_equal(arrays(second, "on_off_rate"), [0.5, np.nan, np.nan])
    np.testing.assert_array_equal(arrays(second, "off_on_rate"), [np.nan, 0.5, 0])
    assert scalar(second, "on_off_rate") == pytest.approx(1 / 2)
    assert scalar(second, "off_on_rate") == pytest.approx(1 / 4)
    assert scalar(second, "recovery_rate") is None  # what was off had never been on
    assert arrays(third, "flips_mean") == [1, 1, 0]
    assert scalar(third, "recovery_rate") == 0
    assert arrays(last, "ever_active_frac") == [1, 0.5, 0]
    assert arrays(last, "flips_mean") == [1.5, 1.5, 0]
    assert scalar(last, "recovery_rate") == pytest.approx(2 / 3)  # of the three pairs that had been on
    assert scalar(last, "off_on_rate") == pytest.approx(2 / 6)
    assert scalar(last, "on_off_rate") is None  # none was on


def test_crossings_follow_from_the_trace(gpt, observer):
    """Over six different models, with a C: what the trace shows is what the crossings count."""
    c = FixedThreshold(init=0.2, active_frac=None, scope="layer")
    watcher = observer(
        gpt(threshold=c), {"trace": Trace(every=1, layers=[1]), "crossings": Crossings(every=1)}
    )
    seen = []
    for seed in range(6):
        watcher.model = gpt(threshold=c, seed=seed)
        seen.append(watcher.observe(seed))
    on = np.stack([look.arrays["L01/trace/preact"][0] > np.float16(0.2) for look in seen])
    last = seen[-1]
    np.testing.assert_allclose(last.arrays["L01/crossings/ever_active_frac"][0], on.any(0).mean(0))
    np.testing.assert_allclose(last.arrays["L01/crossings/flips_mean"][0], (on[1:] != on[:-1]).sum(0).mean(0))
    fell = (on[-2] & ~on[-1]).sum() / on[-2].sum()
    assert last.scalars["probe/crossings/L01/on_off_rate"] == pytest.approx(fell)
    fallen = on[:-1].any(0) & ~on[-2]
    recovered = (fallen & on[-1]).sum() / fallen.sum()
    assert last.scalars["probe/crossings/L01/recovery_rate"] == pytest.approx(recovered)
