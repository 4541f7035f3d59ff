"""The network's own promises: names, loss, start, stream parts, causality."""

import math

import pytest
import torch
import torch.nn.functional as F

from ffnlab import build
from ffnlab.errors import UserError
from ffnlab.nn.gpt import Context, run_block_checkpointed
from ffnlab.nn.head import Head
from ffnlab.nn.norm import LayerNorm
from ffnlab.nn.position import Rope
from ffnlab.nn.residual import PLACEMENTS
from ffnlab.nn.skip import UNet, choose_pairs
from ffnlab.validate import validate

TINY = ["model.n_layers=6", "model.d_model=32", "model.n_heads=2", "model.seq_len=24"]


def make(*overrides: str, vocab: int = 97):
    cfg, _ = build.compose([*TINY, *overrides])
    return build.model(cfg, vocab)


def tokens(rows: int = 2, length: int = 24, vocab: int = 97) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("arch", ["modern", "speedrun"])
def test_untrained_loss_is_ln_of_the_true_vocabulary(arch: str):
    x = tokens()
    assert make(f"arch={arch}").loss(x, x).item() / x.numel() == pytest.approx(math.log(97), abs=1e-5)


def test_record42_counts_its_padding():
    """R8: the untrained loss of record 42 is ln 50304, the padded vocabulary (here: 97 padded to 128)."""
    model = make(
        "arch=record42",
        "model=nano",
        "model.n_layers=12",
        "model.d_model=32",
        "model.n_heads=2",
        "model.seq_len=24",
    )
    x = tokens()
    assert model.loss(x, x).item() / x.numel() == pytest.approx(math.log(128), abs=1e-5)
    assert "attn" not in model.blocks[0]
    assert "ffn" not in model.blocks[0]
    assert "attn" not in model.blocks[7]


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("padded", [97, 128])
def test_chunked_loss_and_gradients_equal_cross_entropy(softcap: float | None, padded: int):
    head = Head(16, padded, vocab_size=97, softcap=softcap, mask_padding=True).double()
    h = torch.randn(20_000, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    targets = torch.randint(0, 97, (20_000,), generator=torch.Generator().manual_seed(2))
    targets[::7] = -100
    ours, theirs = h.clone().requires_grad_(), h.clone().requires_grad_()
    loss = head.loss(ours, targets)
    loss.backward()
    got, head.weight.grad = head.weight.grad, None
    z = theirs @ head.weight.T
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    expected = F.cross_entropy(z[:, :97], targets, reduction="sum")
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, head.weight.grad, atol=1e-3, rtol=1e-5)
    assert torch.isinf(head.logits(h[:2])[:, 97:]).all()


def test_variants_start_from_the_same_shared_weights():
    """DESIGN 7: same seed, other FFN: attention and embedding equal to the bit; another seed: not."""
    a, b, c = make("ffn=mlp"), make("ffn=swiglu"), make("ffn=mlp", "seed=1")
    for name in ("embed.weight", "blocks.3.attn.q.weight", "blocks.5.attn.v.weight"):
        assert torch.equal(a.get_parameter(name), b.get_parameter(name))
        assert not torch.equal(a.get_parameter(name), c.get_parameter(name))


@pytest.mark.parametrize(
    "init",
    ["uniform", "xavier", "gpt2", *(pytest.param(init, marks=pytest.mark.slow) for init in ("normal", "he"))],
)
def test_init_spread(init: str):
    model = make("model.d_model=128", f"model.init={init}", "model.zero_out=false")
    up, down = model.blocks[2]["ffn"].up.weight, model.blocks[2]["ffn"].down.weight
    n_out, n_in = up.shape
    expected = {
        "uniform": 0.5 / math.sqrt(n_in),
        "normal": 0.5 / math.sqrt(n_in),
        "he": math.sqrt(2 / n_in),
        "xavier": math.sqrt(2 / (n_in + n_out)),
        "gpt2": 0.02,
    }[init]
    assert up.std().item() == pytest.approx(expected, rel=0.02)
    if init == "gpt2":
        assert down.std().item() == pytest.approx(0.02 / math.sqrt(12), rel=0.02)


STREAM = ["stream=[smear,embed_norm,x0_lambdas,backout]", "model.value_embeddings=[[1,4],[2]]"]


@pytest.mark.parametrize(
    ("arch", "extra"),
    [
        ("modern", []),
        ("speedrun", STREAM),
        ("nanogpt", STREAM),
        *(pytest.param(arch, [], marks=pytest.mark.slow) for arch in ("speedrun", "nanogpt")),
        *(pytest.param("modern", extra, marks=pytest.mark.slow) for extra in [STREAM]),
        *(
            pytest.param(arch, extra, marks=pytest.mark.slow)
            for arch in ("llama", "original")
            for extra in ([], STREAM)
        ),
    ],
)
def test_no_position_sees_a_later_token(arch: str, extra: list[str]):
    model = make(f"arch={arch}", "model.zero_out=false", *extra).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05)
        x = tokens(1)
        y = x.clone()
        y[0, 15] = (y[0, 15] + 1) % 97
        a, b = model(x), model(y)
    torch.testing.assert_close(a[:, :15], b[:, :15], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(a[:, 15:, :97], b[:, 15:, :97])


def test_unet_skip_equals_its_formula():
    model = make("arch=modern", "skip=unet", "model.zero_out=false").eval()
    x = tokens()
    gate = torch.sigmoid(torch.tensor(-1.5))
    stream, saved = model.embed(x), {}
    for i, block in enumerate(model.blocks):
        if i in (4, 3):
            stream = stream + gate * saved[5 - i]
        stream = saved[i] = block(stream, Context(x))
    torch.testing.assert_close(model.hidden(x), model.norm(stream))
    assert set(model.parts["skip"].values()) == {"skip_01_04", "skip_02_03"}


def test_pairs_of_twelve_layers_are_those_of_record42():
    assert choose_pairs(12, None, []) == [(1, 10), (2, 9), (3, 8), (4, 7), (5, 6)]
    assert choose_pairs(12, None, [10]) == [(2, 9), (3, 8), (4, 7), (5, 6)]
    with pytest.raises(UserError, match="layer 11 receives no skip"):
        choose_pairs(12, None, [11])
    with pytest.raises(UserError, match="at least 4 layers"):
        choose_pairs(3, None, [])
    with pytest.raises(UserError, match="expected \\[i, j\\]"):
        choose_pairs(6, [[2, 9]], [])


def test_a_gate_that_reads_the_stream_equals_its_formula():
    model = make("skip=unet", "skip.gate=input", "model.zero_out=false").eval()
    skip = model.parts["skip"]
    ctx = Context(tokens())
    kept, x = torch.randn(2, 2, 24, 32)
    skip.after(1, kept, ctx)
    torch.testing.assert_close(skip.before(4, x, ctx), x + 0.18242552 * kept)  # w = 0: one gate for all
    with torch.no_grad():
        skip.gate_01_04_w.copy_(torch.randn(12))
        skip.gate_01_04.fill_(0.7)
    gate = 1 / (1 + torch.exp(-(x[..., :12] @ skip.gate_01_04_w + 0.7)))
    torch.testing.assert_close(skip.before(4, x, ctx), x + gate[..., None] * kept)
    assert skip.values()["skip_01_04"].item() == pytest.approx(1 / (1 + math.exp(-0.7)))
    model.loss(tokens(), tokens()).backward()
    assert all(p.grad.abs().sum() > 0 for p in skip.parameters())


def test_concatenated_skip_equals_its_formula():
    model = make("skip=unet_concat", "skip.drop=[3]", "model.zero_out=false").eval()
    x = tokens()
    w = model.parts["skip"].join_01_04.weight
    assert w.shape == (32, 64)
    stream, saved = model.embed(x), {}
    for i, block in enumerate(model.blocks):
        if i == 4:
            stream = stream + stream @ w[:, :32].T + saved[1] @ w[:, 32:].T
        stream = saved[i] = block(stream, Context(x))
    torch.testing.assert_close(model.hidden(x), model.norm(stream))


def test_concatenated_skip_starts_as_no_skip_and_is_a_matrix_for_muon():
    x, plain, model = tokens(), make(), make("skip=unet_concat")
    assert torch.equal(plain(x), model(x))
    assert {n for n in dict(model.named_parameters()) if n.startswith("parts.")} == {
        "parts.skip.join_01_04.weight",
        "parts.skip.join_02_03.weight",
    }
    cfg, _ = build.compose([*TINY, "skip=unet_concat"])
    muon = {
        id(p) for group in build.optimizer(cfg, model).optimizers[0].param_groups for p in group["params"]
    }
    assert id(model.parts["skip"].join_01_04.weight) in muon


def test_dropped_skips_of_both_kinds():
    for skip in ("unet", "unet_concat"):
        assert make(f"skip={skip}", "skip.drop=[4]").parts["skip"].pairs == [(2, 3)]  # E33


@pytest.mark.parametrize("kind", ["sigmoid", "scalar", "vector", "input"])
def test_gates_start_at_the_same_value(kind: str):
    gate = UNet(d_model=32, n_layers=6, pairs=None, drop=[], gate=kind, init=-1.5).gate(1, 4)
    torch.testing.assert_close(gate, torch.full_like(gate, 0.18242552))


def test_backout_and_lambdas_equal_their_formulas():
    model = make("stream=[embed_norm,x0_lambdas,backout]", "model.zero_out=false").eval()
    with torch.no_grad():
        model.parts["x0_lambdas"].lambdas.copy_(torch.rand(6, 2))
    x = tokens()
    lambdas = model.parts["x0_lambdas"].lambdas
    stream = x0 = F.rms_norm(model.embed(x), (32,), eps=1e-6)
    saved = None
    for i, block in enumerate(model.blocks):
        stream = block(lambdas[i, 0] * stream + lambdas[i, 1] * x0, Context(x))
        saved = stream if i == 4 else saved
    torch.testing.assert_close(model.hidden(x), model.norm(stream - 0.5 * saved))


def test_rope_depends_on_distance_only_and_half_of_it_can_rest():
    rope = Rope(d_head=16, seq_len=64, base=10000.0, frac=1.0).double()
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    turned = rope(torch.cat([q, k], dim=0).expand(2, 1, 64, 16))
    scores = turned[0, 0] @ turned[1, 0].T
    torch.testing.assert_close(scores[3, 1], scores[50, 48], atol=1e-6, rtol=1e-6)
    half = Rope(d_head=16, seq_len=64, base=1024.0, frac=0.5)
    x = torch.randn(1, 1, 64, 16)
    still = [4, 5, 6, 7, 12, 13, 14, 15]
    assert torch.equal(half(x)[..., still], x[..., still])


@pytest.mark.parametrize("carry", [1.0, 0.9, "learned"])
@pytest.mark.parametrize("scale", [1.0, 0.8, "learned", "layerscale"])  # 0.8: E72
@pytest.mark.parametrize("placement", ["pre", "post", "peri", "out", "none"])
def test_residual_placements_equal_their_formulas(placement: str, scale: float | str, carry: float | str):
    options = {"d_model": 32, "scale": scale, "scale_init": 0.3, "carry": carry, "dropout": 0.0}
    residual = PLACEMENTS[placement](lambda: LayerNorm(32, gain=True, bias=True, eps=1e-5), **options)
    s, c = residual.scale, residual.carry
    assert getattr(s, "shape", None) == {"learned": (), "layerscale": (32,)}.get(scale)
    learned = [(p, start) for p, start in ((s, 0.3), (c, 1.0)) if isinstance(p, torch.nn.Parameter)]
    for parameter, start in learned:
        assert torch.equal(parameter, torch.full_like(parameter, start))
        torch.nn.init.normal_(parameter)
    x, w = torch.randn(2, 24, 32), torch.randn(32, 32)

    def f(v):
        return torch.tanh(v @ w)

    def norm(v):
        return F.layer_norm(v, (32,), eps=1e-5)

    expected = {
        "pre": lambda: c * x + s * f(norm(x)),
        "post": lambda: norm(c * x + s * f(x)),
        "peri": lambda: c * x + s * norm(f(norm(x))),
        "out": lambda: c * x + s * norm(f(x)),
        "none": lambda: c * x + s * f(x),
    }[placement]()
    torch.testing.assert_close(residual(x, f), expected, atol=1e-5, rtol=1e-5)
    for parameter, _ in learned:
        assert torch.autograd.grad((residual(x, f) * x.roll(1)).sum(), parameter)[0].abs().sum() > 0


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_only_post_norm_has_no_final_norm(placement: str):
    assert isinstance(make(f"residual={placement}").norm, torch.nn.Identity) == (placement == "post")


def test_each_sublayer_can_have_its_own_factors():
    options = ["residual.scale=layerscale", "residual.scale_init=0.1", "residual.ffn_scale=0.5"]
    residual = make(*options, "residual.carry=0.9", "residual.ffn_carry=learned").blocks[1]["residual"]
    assert residual["attn"].scale.shape == (32,)
    assert residual["attn"].scale.mean().item() == pytest.approx(0.1)
    assert (residual["ffn"].scale, residual["attn"].carry) == (0.5, 0.9)
    assert residual["ffn"].carry.shape == ()


def test_a_carried_stream_decays():
    """x <- c x at each of 12 sublayers whose branches are 0: c^12 of the embedding is left."""
    model = make("residual.carry=0.9", "norm=none")  # zero_out: every branch starts at 0
    x = tokens()
    torch.testing.assert_close(model.hidden(x), 0.9**12 * model.embed(x))


@pytest.mark.parametrize("key", ["scale", "ffn_scale", "carry", "ffn_carry"])
def test_an_unknown_factor_is_refused(key: str):
    kind = "layerscale" if "carry" in key else "learnt"
    cfg, _ = build.compose([*TINY, f"residual.{key}={kind}"])
    with pytest.raises(UserError, match=f"residual.{key}='{kind}': expected a number or learned"):
        validate(cfg)


def test_scale_invariance_of_the_network_without_biases():
    """E45: under parameter-free RMSNorm a block's branch does not see the length of its input."""
    block = make("model.zero_out=false").blocks[0]
    x = torch.randn(2, 24, 32)
    branch = block["residual"]["ffn"]
    torch.testing.assert_close(
        branch(x, block["ffn"]) - x, branch(9 * x, block["ffn"]) - 9 * x, atol=1e-4, rtol=1e-3
    )


def test_activation_checkpointing_changes_nothing():
    a = make(
        "arch=record42",
        "model=nano",
        "model.n_layers=12",
        "model.d_model=32",
        "model.n_heads=2",
        "model.seq_len=24",
        "model.zero_out=false",
    )
    x = tokens()
    a.loss(x, x).backward()
    grads = {name: p.grad.clone() for name, p in a.named_parameters() if p.grad is not None}
    a.zero_grad()
    a.run_block = run_block_checkpointed
    a.loss(x, x).backward()
    for name, p in a.named_parameters():
        if name in grads:
            assert torch.equal(p.grad, grads[name]), name


def test_tied_head_shares_the_embedding():
    model = make("arch=nanogpt")
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
