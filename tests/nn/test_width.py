import itertools
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ffnlab.errors import UserError
from ffnlab.nn.ffn.swiglu import SwiGLU
from ffnlab.nn.ffn.width import solve_width
from ffnlab.nn.threshold import LearnedThreshold

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAMES = sorted(p.stem for p in (CONFIGS / "ffn").glob("*.yaml") if p.stem != "none")
ALL = frozenset({"gate", "up", "down"})


def parameters(ffn):
    """Those that one token meets: of experts, its own."""
    experts = sum(p.numel() for name, p in ffn.named_parameters() if name.startswith("experts."))
    met = experts * ffn.top_k // ffn.n_experts if experts else 0
    return sum(p.numel() for p in ffn.parameters()) - experts + met


def flops(ffn):
    """2 * in * out of every matrix, which torch counts while one token passes."""
    counter = FlopCounterMode(display=False)
    with counter:
        ffn(torch.zeros(1, ffn.d_model))
    return counter.get_total_flops()


def within(size, width, target):
    """Whether size(width) is `target` to 1 %, or as near to it as whole neurons allow."""
    off = [abs(size(w) - target) for w in (width, width + 1, width - 1) if w > 0]
    return off[0] <= 0.01 * target or off[0] == min(off)


EXPANSIONS = [0.25, 2.6, 4.0, 1.0, 16.0, 3.0, 2.0, 8.0]
GRID = itertools.product(range(len(NAMES)), range(len(EXPANSIONS)), (0, 1))


@pytest.mark.parametrize(
    ("name", "expansion", "bias"),
    # each FFN at two expansions, one of them with biases, each expansion with several FFNs; the rest is slow
    [
        pytest.param(
            NAMES[i],
            EXPANSIONS[j],
            ALL if biased else frozenset(),
            marks=[] if (j - 2 * i) % 8 == biased else [pytest.mark.slow],
            id=f"{NAMES[i]}-{EXPANSIONS[j]}-{'bias' if biased else 'plain'}",
        )
        for i, j, biased in GRID
    ],
)
def test_parameters_match_the_plain_mlp_within_1_percent(name, expansion, bias, make_ffn):
    D = 96

    def make(F):
        return make_ffn(name, d_model=D, d_ff=F, bias=bias)

    width = solve_width(make, D, expansion, "params", bias)
    F0 = round(expansion * D)
    target = 2 * D * F0 + ((F0 + D) if bias else 0)
    assert within(lambda F: parameters(make(F)), width, target)
    if expansion >= 1:
        assert parameters(make(width)) == pytest.approx(target, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_flops_match_the_plain_mlp_within_1_percent(name, make_ffn):
    D = 128
    width = solve_width(lambda F: make_ffn(name, d_model=D, d_ff=F, bias=ALL), D, 4.0, "flops", ALL)
    assert flops(make_ffn(name, d_model=D, d_ff=width, bias=ALL)) == pytest.approx(4 * D * 4 * D, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_an_ffn_counts_its_own_flops(name, make_ffn):
    ffn = make_ffn(name, d_model=32, d_ff=40)
    assert ffn.flops_per_token() == flops(ffn)


@pytest.mark.parametrize(
    ("name", "d_model", "expansion", "match", "expected"),
    [
        ("mlp", 768, 4.0, "params", 3072),
        ("swiglu", 768, 4.0, "params", 2048),  # 8/3 * 768: Shazeer 2020
        ("swiglu", 128, 4.0, "params", 344),  # 341.3, + 0.8 %
        ("swiglu", 64, 4.0, "params", 172),  # 168 would be 1.6 % off: a multiple of 4
        ("swiglu", 128, 4.0, "width", 512),
        ("mlp", 128, 2.6, "width", 333),
        ("mlp", 128, 2.6, "params", 336),  # 332.8, + 0.9 %
        ("mlp", 768, 0.25, "flops", 192),
        ("paired", 768, 4.0, "width", 3072),
        ("paired", 768, 4.0, "params", 4096),  # 1.5 D F
        ("dual_path", 768, 4.0, "params", 4096),
        ("low_rank", 768, 4.0, "params", 5376),  # rank D/2: 2 F0 - D
        ("multi", 768, 4.0, "params", 3072),
        ("moe", 768, 4.0, "params", 1536),  # two experts a token
        ("moe", 768, 4.0, "width", 3072),
        ("switch", 768, 4.0, "flops", 3064),  # the router costs as much as 4 neurons
    ],
)
def test_known_widths(name, d_model, expansion, match, expected, make_ffn):
    def make(F):
        return make_ffn(name, d_model=d_model, d_ff=F)

    assert solve_width(make, d_model, expansion, match, frozenset()) == expected


def test_a_threshold_per_neuron_does_not_change_the_width(make_ffn):
    def make(F):
        return make_ffn(
            "mlp", d_model=32, d_ff=F, wrap=LearnedThreshold(init=0.0, active_frac=None, scope="neuron")
        )

    assert solve_width(make, 32, 4.0, "params", frozenset()) == 128


def test_a_layer_of_one_neuron_at_least(make_ffn):
    assert solve_width(lambda F: make_ffn("swiglu", d_model=2, d_ff=F), 2, 0.25, "params", frozenset()) == 1


def test_nothing_is_allocated_and_no_random_number_is_drawn_on_the_cpu():
    before = torch.get_rng_state()
    devices = set()

    def make(F):
        ffn = SwiGLU(
            d_model=64, d_ff=F, make_act=lambda _: torch.nn.Identity(), bias=frozenset(), dropout=0.0
        )
        devices.add(ffn.up.weight.device.type)
        return ffn

    solve_width(make, 64, 4.0, "params", frozenset())
    assert devices == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)


def test_unknown_match_names_the_choices(make_ffn):
    with pytest.raises(UserError, match="params, flops, width"):
        solve_width(lambda F: make_ffn("mlp", d_ff=F), 16, 4.0, "speed", frozenset())
