"""The passes of the probes: right values, nothing of training touched, bounded, counted."""

from functools import partial

import jaxtyping
import numpy as np
import pytest
import torch
from torch import nn

from ffnlab.errors import UserError
from ffnlab.nn.act.relu import ReLU2
from ffnlab.nn.gpt import run_block_checkpointed
from ffnlab.nn.threshold import LearnedThreshold
from ffnlab.probe import Observation, Probe, core
from ffnlab.probe.activity import Activity
from ffnlab.probe.base import Scanner, Site
from ffnlab.probe.crossings import Crossings
from ffnlab.probe.gates import Gates
from ffnlab.probe.gradients import Gradients
from ffnlab.probe.preact import Preact
from ffnlab.probe.sparsity import Sparsity
from ffnlab.probe.threshold import Threshold
from ffnlab.probe.trace import Trace

BF16 = partial(torch.autocast, "cpu", torch.bfloat16)


def default_probes(every: int = 1) -> dict[str, Probe]:
    return {
        "activity": Activity(every=every, eps=0.01, bins=10),
        "preact": Preact(every=every, eps=0.1, low=-3.0, high=3.0, bins=12),
        "threshold": Threshold(every=every),
        "gates": Gates(every=every),
    }


def all_probes(every: int = 1) -> dict[str, Probe]:
    return default_probes(every) | {
        "trace": Trace(every=every, layers=None),
        "crossings": Crossings(every=every),
        "gradients": Gradients(every=every),
        "sparsity": Sparsity(every=every, energy=0.99, cett=0.2),
    }


class Keep(Probe):
    """Keeps what it is shown."""

    def watch(self, names):
        self.seen = []
        return [Site(f"blocks.{i}.ffn.act", side) for i in range(4) for side in ("input", "output")]

    def read(self, captured, model):
        self.captured = captured
        return Observation()

    def scanner(self, model):
        keep = self

        class Chunks(Scanner):
            def see(self, site, rows, start):
                keep.seen.append((site, start, rows.clone()))

            def result(self):
                return Observation()

        return self.watch([]), Chunks()


def full_pass(model, tokens, context=torch.no_grad):
    """Input and output of every act over a whole ordinary forward pass."""
    seen = {}

    def note(name):
        def hook(module, args, output):
            seen[Site(name, "input")] = args[0].clone()
            seen[Site(name, "output")] = output.clone()

        return hook

    hooks = [
        model.get_submodule(f"blocks.{i}.ffn.act").register_forward_hook(note(f"blocks.{i}.ffn.act"))
        for i in range(4)
    ]
    model.eval()
    with torch.no_grad(), context():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def test_probed_rows_are_those_of_a_full_pass(gpt, observer, batch):
    """Cropped, ended early and in train mode, the pass sees what a whole forward pass in eval mode sees."""
    model, keep = gpt(dropout=0.5), Keep(every=1)
    model.train()
    observer(model, {"keep": keep}).observe(0)
    tokens, mask = batch
    assert torch.equal(keep.captured.tokens, tokens[mask])
    expected = full_pass(model, tokens)
    assert set(keep.captured.values) == set(expected)
    for site, rows in keep.captured.values.items():
        assert rows.shape == (8, 40)
        torch.testing.assert_close(rows, expected[site][mask])


def test_scan_sees_every_token_once_in_chunks(gpt, observer, scan, monkeypatch):
    monkeypatch.setattr(core, "SCAN_CHUNK_TOKENS", 25)  # two windows of 12
    model, keep = gpt(), Keep(every=1)
    observer(model, {"keep": keep}).scan(0)
    assert {len(rows) for _, _, rows in keep.seen} == {24, 12}
    expected = full_pass(model, scan)
    for site, whole in expected.items():
        chunks = [(start, rows) for at, start, rows in keep.seen if at == site]
        assert [start for start, _ in chunks] == [0, 24, 48]
        torch.testing.assert_close(torch.cat([rows for _, rows in chunks]), whole.flatten(0, 1))


def test_chunk_size_does_not_change_the_counts(gpt, observer, monkeypatch):
    model = gpt()
    whole = observer(model, default_probes()).scan(0)
    monkeypatch.setattr(core, "SCAN_CHUNK_TOKENS", 1)
    parts = observer(model, default_probes()).scan(0)
    assert whole.scalars == parts.scalars
    assert all((parts.arrays[name][0] == array).all() for name, (array, _) in whole.arrays.items())


def test_head_and_last_projection_are_not_computed(gpt, observer):
    model = gpt()

    def refuse(*args):
        raise AssertionError("computed in vain")

    model.head.logits = refuse
    model.blocks[3]["ffn"].down.register_forward_pre_hook(refuse)
    observer(model, default_probes()).observe(0)
    observer(model, default_probes()).scan(0)


def test_no_site_no_pass(gpt, observer):
    model = gpt()
    model.embed.register_forward_pre_hook(lambda *args: pytest.fail("a forward pass"))
    seen = observer(model, {"gates": Gates(every=1)}).observe(0)
    assert seen.scalars
    assert observer(model, {"gates": Gates(every=1)}).scan(0) == Observation()


def test_scan_is_optional(gpt, observer):
    assert observer(gpt(), default_probes(), scan=None).scan(0) == Observation()
    assert observer(gpt(), default_probes(), scan_tokens=0).scan(0) == Observation()


def hooks_of(model):
    return [hook for m in model.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)]


def test_modes_hooks_and_random_state_are_put_back(gpt, observer):
    model = gpt(dropout=0.5)
    model.train()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    watcher = observer(model, default_probes())
    watcher.observe(0)
    watcher.scan(0)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not hooks_of(model)


class Broken(Probe):
    """Fails while it reads."""

    def watch(self, names):
        return [Site("blocks.0.ffn.act", "input")]

    def read(self, captured, model):
        raise KeyError("a bug")


def test_an_error_leaves_nothing_behind(gpt, observer):
    model = gpt(dropout=0.5)
    model.train()
    with pytest.raises(KeyError):
        observer(model, {"broken": Broken(every=1)}).observe(0)
    model.blocks[2]["attn"].q.register_forward_pre_hook(lambda *args: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        observer(model, default_probes()).observe(0)
    assert len(hooks_of(model)) == 1  # that of this test
    assert all(m.training for m in model.modules())
    assert torch.is_grad_enabled()


class Noisy(ReLU2):
    """A variant that draws random numbers even in eval mode and keeps a buffer."""

    def forward(self, pre):
        return super().forward(pre + 0.1 * torch.randn_like(pre))


def train(model, loss, look, context=torch.enable_grad, on_gradients=lambda step: None):
    """Five updates with dropout; `on_gradients(step)` before each and `look(step)` after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(3)
    torch.manual_seed(4)
    losses = []
    look(0)
    for step in range(1, 6):
        tokens = torch.randint(61, (2, 13), generator=data)
        with context():
            value = loss(tokens[:, :-1], tokens[:, 1:])
        value.backward()
        losses.append(value.item())
        on_gradients(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        look(step)
    return losses, [p.detach().clone() for p in model.parameters()], torch.get_rng_state()


def assert_same(one, two):
    assert one[0] == two[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))
    assert torch.equal(one[2], two[2])


def look_with(observer, model, **changes):
    watcher = observer(model, all_probes(), **changes)
    seen = []

    def look(step):
        seen.append(watcher.observe(step))
        seen.append(watcher.scan(step))

    return {"look": look, "on_gradients": watcher.on_gradients}, seen


@pytest.mark.parametrize(
    ("precision", "checkpointed"),
    [
        (torch.enable_grad, False),
        (BF16, True),
        pytest.param(torch.enable_grad, True, marks=pytest.mark.slow),
        pytest.param(BF16, False, marks=pytest.mark.slow),
    ],
)
def test_training_is_bit_identical(gpt, observer, precision, checkpointed):
    learned = {"threshold": LearnedThreshold(init=-0.5, active_frac=None, scope="neuron")}

    def model():
        made = gpt(act=lambda n: Noisy(d_ff=n), dropout=0.2, scale="learned", **learned)
        if checkpointed:
            made.run_block = run_block_checkpointed
        return made.train()

    plain, watched = model(), model()
    looks, seen = look_with(observer, watched, **({"autocast": BF16} if precision is BF16 else {}))
    without = train(plain, plain.loss, lambda step: None, precision)
    assert_same(without, train(watched, watched.loss, context=precision, **looks))
    assert all(observation.scalars for observation in seen)


def test_gradients_are_left_alone(gpt, observer, batch):
    model = gpt()
    model.loss(batch[0], batch[0]).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    looks, _ = look_with(observer, model)
    looks["on_gradients"](0)
    looks["look"](0)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def compiled_training(gpt, observer, backend, watch):
    torch.compiler.reset()
    graphs = []

    def counting(module, inputs):
        graphs.append(module)
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    model = gpt(dropout=0.0).train()
    looks, seen = look_with(observer, model) if watch else ({"look": lambda step: None}, [])
    result = train(model, torch.compile(model.loss, backend=counting), **looks)
    torch.compiler.reset()
    return result, len(graphs), seen


@pytest.mark.parametrize(
    "backend",
    [pytest.param("eager", marks=pytest.mark.slow), pytest.param("inductor", marks=pytest.mark.slow)],
)
def test_compiled_training_is_bit_identical_and_not_recompiled(gpt, observer, backend, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # its checks cannot be traced
    without, graphs, _ = compiled_training(gpt, observer, backend, watch=False)
    watched, as_many, seen = compiled_training(gpt, observer, backend, watch=True)
    assert_same(without, watched)
    assert graphs == as_many > 0
    assert all(observation.scalars for observation in seen)


def test_the_pass_has_the_precision_of_training(gpt, observer, batch):
    model, keep = gpt(), Keep(every=1)
    observer(model, {"keep": keep}, autocast=BF16).observe(0)
    expected = full_pass(model, batch[0], BF16)
    for site, rows in keep.captured.values.items():
        assert rows.dtype == torch.bfloat16
        torch.testing.assert_close(rows, expected[site][batch[1]], rtol=0.05, atol=0.05)


def test_only_the_probes_that_are_due_look(gpt, observer):
    probes = {"activity": Activity(every=10, eps=0.01, bins=5), "preact": default_probes(7)["preact"]}
    watcher = observer(gpt(), probes, every_step_until=0)
    kinds = {s: {name.split("/")[1] for name in watcher.observe(s).scalars} for s in (0, 1, 7, 10, 70, 300)}
    both = {"activity", "preact"}
    assert kinds == {0: both, 1: set(), 7: {"preact"}, 10: {"activity"}, 70: both, 300: both}
    assert [watcher.due(step) for step in (0, 1, 7, 10)] == [True, False, True, True]


def test_size_is_what_the_run_records(gpt, observer):
    model = gpt(gate="vector")
    watcher = observer(model, all_probes(every=7), steps=40, every_step_until=3)
    sizes = watcher.sizes(scans=4)
    assert not watcher.state()  # sizing is no look
    seen = [watcher.observe(0)]
    for step in range(1, 41):
        watcher.on_gradients(step)
        seen.append(watcher.observe(step))
    seen += [watcher.scan(0) for _ in range(4)]
    recorded = sum(array.nbytes for observation in seen for array, _ in observation.arrays.values())
    assert sum(sizes.values()) == watcher.check_budget(scans=4) == recorded > 0
    assert sizes["trace"] == 10 * 2 * 8 * 40 * 2  # looks, layers, tokens, neurons, bytes
    with pytest.raises(UserError, match=r"probe\.budget_gib is 1e-06.*crossings [\d.e-]+ GiB, "):
        observer(model, all_probes(), budget_gib=1e-6).check_budget(scans=4)


def test_memory_of_the_probes_goes_through_a_checkpoint(gpt, observer, tmp_path):
    """Looks after a restore are those of an observer that has gone on, to the bit."""
    models = [gpt(seed=seed) for seed in range(5)]
    one, two = (observer(models[0], all_probes()) for _ in range(2))

    def looks(watcher, steps):
        seen = []
        for step in steps:
            watcher.model = models[step]
            seen.append(watcher.observe(step))
        return seen

    whole = looks(one, range(5))
    looks(two, range(3))
    torch.save(two.state(), tmp_path / "state")
    later = observer(models[0], all_probes())
    later.restore(torch.load(tmp_path / "state", weights_only=True))
    for a, b in zip(whole[3:], looks(later, (3, 4)), strict=True):
        assert a.scalars == b.scalars
        for name, (array, _) in a.arrays.items():
            np.testing.assert_array_equal(array, b.arrays[name][0])


def test_gradients_are_shown_where_they_are_wanted_and_due(gpt, observer, monkeypatch):
    asked = []
    for kind in (Gradients, Activity):
        monkeypatch.setattr(kind, "on_gradients", lambda probe, model: asked.append(type(probe)))
    watcher = observer(gpt(), all_probes(every=5), every_step_until=0)
    for step in (4, 5):
        watcher.on_gradients(step)
    assert asked == [Gradients]


def test_fixed_arrays_say_what_is_looked_at(gpt, observer, batch, scan):
    tokens, mask = batch
    fixed = observer(gpt(), default_probes()).fixed()
    (token, dims), (window, _), (position, _) = (
        fixed[f"probe_batch/{name}"] for name in ("token", "window", "position")
    )
    assert dims == ("token",)
    assert token.dtype == window.dtype == position.dtype == np.int32
    assert np.array_equal(tokens[window, position], token)
    assert sorted(zip(window, position, strict=True)) == [tuple(place) for place in mask.nonzero().tolist()]
    assert np.array_equal(fixed["scan/token"][0], scan)
    assert fixed["scan/token"][1] == ("window", "position")
    assert fixed["preact/edge"][0].tolist() == [-3 + i / 2 for i in range(13)]
    assert observer(gpt(), {}).fixed() == {}


def test_a_diverged_model_stops_no_look(gpt, observer):
    model = gpt()
    with torch.no_grad():
        model.blocks[1]["ffn"].up.weight.fill_(torch.nan)
    watcher = observer(model, all_probes())
    watcher.on_gradients(1)
    seen = watcher.observe(1)
    watcher.scan(1)
    assert seen.arrays["L02/preact/hist"][0].sum() == 0


def test_cost_is_charged_to_each_probe_once(gpt, observer, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr(core.time, "perf_counter", lambda: float(next(ticks)))
    watcher = observer(gpt(), default_probes())
    began = next(ticks)
    watcher.observe(0)
    watcher.scan(0)
    total = next(ticks) - began
    assert all(cost > 0 for cost in watcher.cost.values())
    assert set(watcher.cost) == {"forward", "activity", "preact", "threshold", "gates"}
    assert watcher.seconds == sum(watcher.cost.values()) == total - 3  # the clock's own ticks between calls


def test_a_model_without_ffn_has_no_neurons(observer):
    model = nn.Sequential(nn.Embedding(61, 4))
    assert observer(model, default_probes()).observe(0) == Observation()
    assert observer(model, default_probes()).scan(0) == Observation()
