"""Counting against published numbers (E60, E61, E97, E100, E104) and against torch's own counter."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from ffnlab import build
from ffnlab.facts import skippable, token_share
from ffnlab.nn.act.gelu import GELU
from ffnlab.nn.act.relu import ReLU2
from ffnlab.nn.count import COMPONENTS, component, count, tied, total
from ffnlab.nn.ffn.mlp import MLP
from ffnlab.nn.ffn.paired import Paired
from ffnlab.nn.ffn.reglu2 import ReGLU2


class Bare(nn.Module):
    """Modules under the names that the model gives them, and nothing else."""

    def __init__(self, **parts: nn.Module):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def mlp(d: int, f: int) -> Bare:
    return Bare(up=nn.Linear(d, f), act=nn.GELU(), down=nn.Linear(f, d))


def blocks(*parts: dict[str, nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(Bare(**part) for part in parts)


def test_two_matrix_ffn_of_gpt2():
    """E60: 2,362,368 + 2,360,064 = 4,722,432 parameters, 9.44 MFLOP a token."""
    ffn = mlp(768, 3072)
    sizes = [sum(p.numel() for p in part.parameters()) for part in (ffn.up, ffn.down)]
    assert sizes == [2_362_368, 2_360_064]
    cost = count(Bare(blocks=blocks({"ffn": ffn})), seq_len=1024)["ffn"]
    assert cost.parameters == 4_722_432
    assert cost.flops_per_token == 4 * 768 * 3072 == 9_437_184
    assert cost.bytes == 4 * 4_722_432


def test_twelve_ffns_outweigh_attention():
    """E61: 12 layers hold 56,669,184 FFN parameters and 12 * 4 * 768^2 of attention."""
    with torch.device("meta"):
        attention = [{n: nn.Linear(768, 768, bias=False) for n in ("q", "k", "v", "out")} for _ in range(12)]
        model = Bare(blocks=blocks(*({"attn": Bare(**a), "ffn": mlp(768, 3072)} for a in attention)))
    costs = count(model, seq_len=1024)
    assert costs["ffn"].parameters == 56_669_184
    assert costs["attention"].parameters == 12 * 4 * 768**2 == 28_311_552


def test_small_mlp_of_the_text():
    """E97: 784-128-64-10 holds 109,386 parameters, 437,544 bytes, and costs about 2 x 109 K FLOPs."""
    net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    cost = total(count(net, seq_len=1).values())
    assert (cost.parameters, cost.bytes) == (109_386, 437_544)
    assert cost.flops_per_token == 2 * (109_386 - 128 - 64 - 10)


def test_square_layers_of_width_4096():
    """E100: L layers of width d hold L * d^2."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(2)))
    assert total(count(net, seq_len=1).values()).parameters == 33_554_432


def test_four_bytes_a_weight_two_in_half_precision():
    """E104: weights take 4P bytes in fp32."""
    net = nn.Linear(10, 10, bias=False)
    assert total(count(net, 1).values()).bytes == 400
    assert total(count(net.bfloat16(), 1).values()).bytes == 200


def test_agrees_with_the_counter_of_torch():
    """Attention, FFN and head, run on T tokens, cost T times what is read off their structure."""
    d, heads, t, vocab = 24, 3, 10, 50
    attn = Bare(**{name: nn.Linear(d, d) for name in ("q", "k", "v", "out")})
    ffn, head = mlp(d, 96), nn.Linear(d, vocab)
    model = Bare(blocks=blocks({"attn": attn, "ffn": ffn}), head=head)
    x = torch.randn(1, t, d)
    with FlopCounterMode(display=False) as counter:
        q, k, v = (attn.get_submodule(n)(x).view(1, t, heads, d // heads).transpose(1, 2) for n in "qkv")
        y = F.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        y = attn.out(y.transpose(1, 2).reshape(1, t, d))
        head(ffn.down(ffn.act(ffn.up(y))))
    assert counter.get_total_flops() == t * total(count(model, seq_len=t).values()).flops_per_token


class Masked(nn.Module):
    """Attention with explicit products, so that torch's counter sees them."""

    def __init__(self, attn: nn.Module, heads: int, groups: int):
        super().__init__()
        self.attn, self.heads, self.groups = attn, heads, groups

    def forward(self, x):
        b, t, d = x.shape
        q = self.attn.q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = (m(x).view(b, t, self.groups, -1).transpose(1, 2) for m in (self.attn.k, self.attn.v))
        k, v = (y.repeat_interleave(self.heads // self.groups, dim=1) for y in (k, v))
        return self.attn.out((F.softmax(q @ k.mT, dim=-1) @ v).transpose(1, 2).reshape(b, t, d))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_queries_agree_with_the_counter_of_torch(groups):
    """Fewer rows in k and v, as many scores; the parameters are those of the matrices."""
    sizes = ["model.n_layers=1", "model.d_model=32", "model.n_heads=4", "model.seq_len=20"]
    cfg, _ = build.compose([*sizes, f"attention.n_kv_heads={groups}"])
    model = build.model(cfg, 64)
    cost = count(model, seq_len=20)["attention"]
    with FlopCounterMode(display=False) as counter:
        Masked(model.blocks[0]["attn"], 4, groups)(torch.randn(1, 20, 32))
    assert counter.get_total_flops() == 20 * cost.flops_per_token
    assert cost.parameters == 2 * 32 * 32 + 2 * 32 * 8 * groups


def test_a_window_is_what_attention_is_charged_for():
    """Of 3 layers two see 8 positions and one sees all 64 (or all that there are)."""
    sizes = ["model.n_layers=3", "model.d_model=32", "model.n_heads=4", "model.seq_len=64"]
    cfg, _ = build.compose([*sizes, "attention.window=8", "attention.long_layers=[1]"])
    model = build.model(cfg, 64)
    matrices = 3 * 4 * 2 * 32 * 32
    assert count(model, seq_len=64)["attention"].flops_per_token == matrices + 4 * 32 * (8 + 64 + 8)
    assert count(model, seq_len=6)["attention"].flops_per_token == matrices + 4 * 32 * (6 + 6 + 6)
    assert [block["attn"].window for block in model.blocks] == [8, None, 8]


def test_the_matrices_of_concatenated_skips_are_counted():
    plain, skips = (
        count(build.model(build.compose(["model.n_layers=6", "model.d_model=32", *more])[0], 64), 8)["other"]
        for more in ([], ["skip=unet_concat"])
    )
    assert skips.parameters - plain.parameters == 2 * 2 * 32 * 32
    assert skips.flops_per_token - plain.flops_per_token == 2 * 2 * 2 * 32 * 32


def test_a_shared_layer_is_stored_once_and_paid_for_twice():
    shared = mlp(8, 32)
    once = count(Bare(blocks=blocks({"ffn": shared})), 1)["ffn"]
    twice = count(Bare(blocks=blocks({"ffn": shared}, {"ffn": shared})), 1)["ffn"]
    assert twice.parameters == once.parameters
    assert twice.flops_per_token == 2 * once.flops_per_token


def test_a_tied_head_is_counted_once_and_said_so():
    embed, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    head.weight = embed.weight
    model = Bare(embed=embed, head=head)
    costs = count(model, seq_len=4)
    assert costs["embedding"].parameters == 400
    assert costs["head"].parameters == 0
    assert costs["head"].flops_per_token == 2 * 8 * 50
    assert tied(model) == [("embed.weight", "head.weight")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embed.weight", "embedding"),
        ("parts.position.table.weight", "embedding"),
        ("blocks.3.attn.q.weight", "attention"),
        ("blocks.3.ffn.up.weight", "ffn"),
        ("blocks.3.ffn_extra.down.weight", "ffn"),
        ("blocks.3.ffn.act.threshold", "ffn"),
        ("blocks.3.residual.ffn.norm.weight", "norms"),
        ("blocks.3.residual.ffn.scale", "other"),
        ("blocks.3.attn.q_norm.weight", "norms"),
        ("norm.weight", "norms"),
        ("head.weight", "head"),
        ("parts.unet.gate_01_04", "other"),
        ("parts.backout.beta", "other"),
    ],
)
def test_components_follow_the_names(name, expected):
    assert component(name) == expected
    assert expected in COMPONENTS


def test_what_a_sparse_kernel_could_skip_in_training():
    """Three products of 2 D F a matrix; the one that gives the pre-activations stays dense."""
    sizes = {"d_model": 8, "d_ff": 24, "bias": frozenset(), "dropout": 0.0}
    one = 2 * 8 * 24
    for ffn, act, products in (
        (MLP, ReLU2, 5),
        (ReGLU2, ReLU2, 8),
        (Paired, ReLU2, 3),  # one input vector serves two neurons: not skipped
        (MLP, GELU, 0),
    ):
        assert (
            ffn(make_act=lambda width, act=act: act(d_ff=width), **sizes).skippable_flops_per_token()
            == products * one
        )
    cfg, _ = build.compose(["model.n_layers=2", "threshold=learned", "ffn.extra=true"])
    each = 5 * 2 * 128 * 512
    labels = ("L00", "L00_extra", "L01", "L01_extra")
    assert skippable(build.model(cfg, 300)) == dict.fromkeys(labels, each)
    assert token_share(build.model(cfg, 300)) == dict.fromkeys(labels, 1.0)


def test_what_a_sparse_kernel_could_skip_in_experts_and_small_ffns():
    """By hand: a token meets 2 of 8 experts of width 256; three FFNs of 171, 171 and 170."""
    cfg, _ = build.compose(["model.n_layers=1", "ffn=moe"])
    moe = build.model(cfg, 300)
    assert skippable(moe) == {"L00": 2 * 5 * 2 * 128 * 256}
    assert token_share(moe) == {"L00": 0.25}
    cfg, _ = build.compose(["model.n_layers=1", "ffn=multi", "ffn.n=3"])
    multi = build.model(cfg, 300)
    assert skippable(multi) == {"L00": 5 * 2 * 128 * 512}
    assert token_share(multi) == {"L00": 1.0}
