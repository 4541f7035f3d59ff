"""What the sources say of single FFN variants: pairs, small FFNs, thin matrices, no FFN."""

import pytest
import torch

from ffnlab import build
from ffnlab.errors import UserError
from ffnlab.nn.count import count, total
from ffnlab.nn.gpt import Context
from ffnlab.nn.memory import imagined
from ffnlab.probe.base import layers
from ffnlab.record.tensors import load_weights, pack
from ffnlab.validate import validate

TINY = ["model.n_layers=4", "model.d_model=32", "model.n_heads=2", "model.seq_len=16"]


def make(*overrides: str):
    cfg, _ = build.compose([*TINY, *overrides])
    return build.model(cfg, 97)


def tokens() -> torch.Tensor:
    return torch.randint(0, 97, (4, 16), generator=torch.Generator().manual_seed(0))


def active(gpt, layer: int = 0) -> torch.Tensor:
    """Which neurons of a layer are active on which token, as pairs: (tokens, pair, 2)."""
    seen = []
    act = gpt.blocks[layer]["ffn"].act
    with act.register_forward_hook(lambda module, args, out: seen.append(out > 0)):
        gpt(tokens())
    return seen[0].flatten(0, 1).unflatten(-1, (2, -1)).transpose(1, 2)


@pytest.mark.parametrize("ffn", ["paired", "paired_init", "dual_path"])
def test_one_of_each_pair_is_active_on_every_token_at_the_start(ffn):
    assert (active(make(f"ffn={ffn}")).sum(-1) == 1).all()  # E34


def test_a_gap_leaves_pairs_of_which_none_is_active():
    """E35: at C = 0.5 and sd 0.5 a neuron is active on 15.9 %, a pair on 31.7 %, never both of a pair."""
    gpt = make("ffn=paired", "threshold=fixed", "threshold.init=0.5", "model.d_model=256", "arch=speedrun")
    pairs = active(gpt)
    assert pairs.float().mean().item() == pytest.approx(0.159, abs=0.01)
    assert pairs.any(-1).float().mean().item() == pytest.approx(0.317, abs=0.02)
    assert not pairs.all(-1).any()


def test_pairs_save_what_the_source_says():
    """E34: 11 * 768 * 3072 / 2 parameters in twelve layers of which the first has no FFN."""
    small = ["model=small", "model.drop_ffn=[0]", "ffn.match=width"]
    with imagined():
        sizes = [
            total(count(build.model(build.compose([*small, f"ffn={ffn}"])[0], 50257), 8).values()).parameters
            for ffn in ("mlp", "paired")
        ]
    assert sizes[0] - sizes[1] == 12_976_128


@pytest.mark.parametrize("init", ["uniform", "gpt2"])
def test_paired_init_starts_as_paired_to_the_bit_and_parts_from_it(init):
    options = ["model.zero_out=false", f"model.init={init}"]
    held, free = make("ffn=paired", *options), make("ffn=paired_init", *options)
    x = tokens()
    torch.testing.assert_close(held(x), free(x), atol=1e-6, rtol=1e-6)
    up = free.blocks[1]["ffn"].up.weight
    half = held.blocks[1]["ffn"].up.weight
    assert torch.equal(up, torch.cat([half, -half]))
    optimizer = build.optimizer(build.compose(["optim=adamw"])[0], free)
    free.loss(x, x).backward()
    optimizer.step()
    assert not torch.equal(up[:64], -up[64:])


def test_dual_path_is_paired_with_its_way_down_cut_in_two(make_ffn):
    dual, paired = make_ffn("dual_path"), make_ffn("paired")
    paired.up.load_state_dict(dual.up.state_dict())
    paired.down.weight.data = torch.cat([dual.down.plus.weight, dual.down.minus.weight], dim=1)
    x = torch.randn(50, 16)
    torch.testing.assert_close(dual(x), paired(x))


@pytest.mark.parametrize("ffn", ["paired", "dual_path", "paired_init"])
def test_an_odd_width_leaves_one_neuron_alone(ffn, make_ffn):
    odd = make_ffn(ffn, d_ff=7)
    assert odd(torch.randn(3, 16)).shape == (3, 16)
    assert odd.hidden(torch.randn(3, 16)).shape == (3, 7)


def test_small_ffns_in_parallel_are_one_mlp_cut_in_pieces(make_ffn):
    multi, mlp = make_ffn("multi"), make_ffn("mlp")
    mlp.up.weight.data = torch.cat([part.up.weight for part in multi.parts])
    mlp.down.weight.data = torch.cat([part.down.weight for part in multi.parts], dim=1)
    x = torch.randn(50, 16)
    torch.testing.assert_close(multi(x), mlp(x))


def test_small_ffns_in_sequence_equal_their_formula_and_cost_the_same():
    parallel, sequence = make("ffn=multi", "ffn.n=3"), make("ffn=multi", "ffn.n=3", "ffn.mode=sequence")
    ffn = make("ffn=multi", "ffn.n=3", "ffn.mode=sequence", "model.zero_out=false").blocks[0]["ffn"]
    one, two, three = ffn.parts
    assert [part.d_ff for part in ffn.parts] == [43, 43, 42]
    x = torch.randn(2, 16, 32)
    a = x + one(x)
    b = a + two(a)
    torch.testing.assert_close(ffn(x), b + three(b) - x)
    costs = [total(count(gpt, 16).values()) for gpt in (parallel, sequence)]
    assert costs[0] == costs[1]


def test_more_small_ffns_than_neurons_are_refused():
    with pytest.raises(UserError, match=r"ffn\.n=500"):
        make("ffn=multi", "ffn.n=500", "ffn.match=width")


@pytest.mark.parametrize("init", ["uniform", "normal", "he", "xavier"])
def test_thin_matrices_start_with_the_pre_activations_of_full_ones(init):
    options = ["model.d_model=256", "model.n_layers=1", f"model.init={init}"]
    x = torch.nn.functional.rms_norm(torch.randn(500, 256), (256,))
    thin = make("ffn=low_rank", "ffn.rank_frac=0.5", *options).blocks[0]["ffn"]
    sd = thin.up(x).std().item()
    n_in, n_out = thin.up.out.weight.T.shape
    one = {"uniform": 0.5, "normal": 0.5, "he": 2**0.5, "xavier": (2 * n_in / (n_in + n_out)) ** 0.5}[init]
    assert sd == pytest.approx(one, rel=0.05)
    assert torch.linalg.matrix_rank(thin.up.out.weight @ thin.up.into.weight) == 128


@pytest.mark.parametrize("frac", [0.0, 1.5])
def test_a_rank_beyond_the_matrix_is_refused(frac):
    with pytest.raises(UserError, match="rank_frac"):
        make("ffn=low_rank", f"ffn.rank_frac={frac}")


def test_without_an_ffn_the_stream_passes_unchanged():
    """E93: every block is its attention alone; the rest of the network is the same to the bit."""
    bare, whole = make("ffn=none", "model.zero_out=false"), make("model.zero_out=false")
    x = tokens()
    assert [block.roles for block in bare.blocks] == [("attn",)] * 4
    with torch.no_grad():
        for block in whole.blocks:
            block["ffn"].down.weight.zero_()
    assert torch.equal(bare(x), whole(x))
    assert count(bare, 16)["ffn"].parameters == count(bare, 16)["ffn"].flops_per_token == 0


def test_without_attention_every_position_is_on_its_own():
    gpt = make("attention=none", "model.zero_out=false").eval()
    assert [block.roles for block in gpt.blocks] == [("ffn",)] * 4
    x = tokens()
    other = x.clone()
    other[:, :10] = 5
    torch.testing.assert_close(gpt(x)[:, 10:], gpt(other)[:, 10:])
    assert count(gpt, 16)["attention"].parameters == count(gpt, 16)["attention"].flops_per_token == 0


def test_without_both_only_embedding_and_head_are_left():
    gpt = make("attention=none", "ffn=none")
    assert {name.split(".")[0] for name, _ in gpt.named_parameters()} == {"embed", "head"}


@pytest.mark.parametrize("order", ["attn_ffn", "ffn_attn", "parallel"])
def test_orders_equal_their_formulas(order):
    """E91; s = 0.8 and both norms, so that nothing is hidden by a neutral value."""
    gpt = make(f"model.order={order}", "residual=peri", "residual.scale=0.8", "model.zero_out=false").eval()
    block, ctx = gpt.blocks[2], Context(tokens())
    attn, ffn = (
        (lambda x: 0.8 * norm(block["attn"](norm(x), ctx))),
        (lambda x: 0.8 * norm(block["ffn"](norm(x)))),
    )

    def norm(v):
        return torch.nn.functional.rms_norm(v, (32,), eps=1e-6)

    x = torch.randn(4, 16, 32)
    expected = {
        "attn_ffn": lambda: (y := x + attn(x)) + ffn(y),
        "ffn_attn": lambda: (y := x + ffn(x)) + attn(y),
        "parallel": lambda: x + attn(x) + ffn(x),
    }[order]()
    torch.testing.assert_close(block(x, ctx), expected, atol=1e-5, rtol=1e-5)


def test_parallel_sublayers_carry_the_stream_as_far_as_successive_ones():
    gpt = make("model.order=parallel", "residual.carry=0.9", "residual.ffn_carry=0.5")
    x = torch.randn(4, 16, 32)  # what they add is 0 at the start
    torch.testing.assert_close(gpt.blocks[0](x, Context(tokens())), 0.45 * x)


def test_parallel_sublayers_have_no_post_norm():
    with pytest.raises(UserError, match=r"model\.order=parallel with residual=post"):
        validate(build.compose(["model.order=parallel", "residual=post"])[0])


def test_a_second_ffn_stands_after_the_first():
    """E92: other weights, its own norm and residual, twice the parameters."""
    one, two = make("model.zero_out=false"), make("ffn.extra=true", "model.zero_out=false")
    assert two.blocks[0].roles == ("attn", "ffn", "ffn_extra")
    assert make("ffn.extra=true", "model.order=ffn_attn").blocks[0].roles == ("ffn", "ffn_extra", "attn")
    assert make("ffn.extra=true", "model.drop_ffn=[1]").blocks[1].roles == ("attn",)
    costs = [count(gpt, 16)["ffn"] for gpt in (one, two)]
    assert costs[1] == costs[0] + costs[0]
    block, ctx = two.blocks[3], Context(tokens())
    x = torch.randn(2, 16, 32)
    y = one.blocks[3](x, ctx)  # the shared sublayers have the same weights
    norm = torch.nn.functional.rms_norm(y, (32,), eps=1e-6)
    torch.testing.assert_close(block(x, ctx), y + block["ffn_extra"](norm))
    assert not torch.equal(block["ffn"].up.weight, block["ffn_extra"].up.weight)


def test_an_expansion_for_every_layer():
    gpt = make("ffn.expansion_by_layer=[1,2,4,8]", "ffn=swiglu")
    per_layer = [sum(p.numel() for p in block["ffn"].parameters()) for block in gpt.blocks]
    assert per_layer == [pytest.approx(2 * 32 * 32 * e, rel=0.02) for e in (1, 2, 4, 8)]
    alike = make("ffn.expansion_by_layer=[4,4,4,4]").state_dict()
    assert all(torch.equal(p, alike[name]) for name, p in make().state_dict().items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ffn.expansion_by_layer=[1,2]"], "expected one for each of the 4 layers"),
        (["ffn.expansion_by_layer=[1,2,4,99]"], "ffn.expansion_by_layer=99"),
        (["ffn.expansion_by_layer=[1,2,4,8]", "ffn.share=all"], "different widths"),
        (["ffn.share=up"], "ffn.share='up': expected one of none, all, down"),
        (["model.order=ffn"], "model.order='ffn'"),
    ],
)
def test_what_does_not_fit_is_said_before_the_run(overrides, message):
    with pytest.raises(UserError, match=message):
        validate(build.compose([*TINY, *overrides])[0])


@pytest.mark.parametrize(
    ("share", "ffn"),
    [
        ("all", "swiglu"),
        ("down", "multi"),
        ("down", "mlp"),
        ("all", "low_rank"),
        *(pytest.param("all", ffn, marks=pytest.mark.slow) for ffn in ("mlp", "multi")),
        *(pytest.param("down", ffn, marks=pytest.mark.slow) for ffn in ("swiglu", "low_rank")),
    ],
)
def test_layers_share_weights_that_are_stored_once_and_paid_for_in_each(share, ffn):
    """E79."""
    options = [f"ffn={ffn}", "threshold=learned", "ffn.extra=true", "model.zero_out=false"]
    own, gpt = make(*options), make(*options, f"ffn.share={share}")
    names = {name for name, _ in gpt.named_parameters()}
    for role in ("ffn", "ffn_extra"):
        first = dict(gpt.blocks[0][role].named_parameters())
        for i, block in enumerate(gpt.blocks[1:], 1):
            for name, parameter in block[role].named_parameters():
                shared = share == "all" or "down" in name.split(".")
                assert (parameter is first[name]) == shared
                assert (f"blocks.{i}.{role}.{name}" in names) == (not shared)
        for name, parameter in first.items():  # and they start as those of the first layer do
            assert torch.equal(parameter, own.blocks[0][role].get_parameter(name))
    before, after = count(own, 16)["ffn"], count(gpt, 16)["ffn"]
    assert after.flops_per_token == before.flops_per_token
    in_layer = sum(
        p.numel()
        for name, p in own.named_parameters()
        if name.startswith("blocks.0.ffn") and (share == "all" or "down" in name.split("."))
    )
    assert before.parameters - after.parameters == 3 * in_layer


def test_a_shared_weight_gets_the_gradient_of_every_layer_and_its_own_probes():
    gpt = make("ffn.share=all", "model.zero_out=false")
    x = tokens()
    gpt.loss(x, x).backward()
    together = gpt.blocks[0]["ffn"].up.weight.grad
    apart = make("model.zero_out=false")
    apart.load_state_dict(gpt.state_dict())
    apart.loss(x, x).backward()
    torch.testing.assert_close(together, sum(block["ffn"].up.weight.grad for block in apart.blocks))
    assert list(layers(name for name, _ in gpt.named_modules())) == ["L00", "L01", "L02", "L03"]


def test_a_checkpoint_stores_a_shared_weight_once_and_restores_all_its_names(tmp_path):
    gpt, other = make("ffn.share=all", "model.zero_out=false"), make("ffn.share=all", "seed=1")
    (tmp_path / "model.safetensors").write_bytes(pack(gpt.state_dict(), step=3))
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * sum(p.nbytes for p in gpt.parameters())
    other.load_state_dict(load_weights(tmp_path / "model.safetensors"), strict=True)
    assert torch.equal(gpt(tokens()), other(tokens()))
