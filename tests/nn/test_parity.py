"""The whole network against independent implementations, weights mapped over, fp32."""

import pytest
import torch
from torch import nn

from ffnlab import build
from ffnlab.formats import gpt2, llama
from ffnlab.nn.gpt import Context

transformers = pytest.importorskip("transformers")
TINY = ["model.n_layers=2", "model.d_model=32", "model.n_heads=4", "model.seq_len=16", "model.pad_vocab_to=1"]
TOKENS = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(1))


def shake(model: nn.Module) -> None:
    """Give every parameter a random value, gains and biases too, so that a wrong mapping shows."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))


def test_gpt2_logits_equal_hugging_face():
    cfg, _ = build.compose(["arch=nanogpt", *TINY, "act=gelu_tanh"])
    ours = build.model(cfg, 97).eval()
    shake(ours)
    config = transformers.GPT2Config(vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours_untied = {name: tensor for name, tensor in ours.state_dict().items() if name != "head.weight"}
    state = gpt2.theirs(ours_untied)
    missing = theirs.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] or not missing.missing_keys
    theirs.tie_weights()
    with torch.no_grad():
        difference = (ours(TOKENS) - theirs(TOKENS).logits).abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize(
    ("family", "overrides", "theirs"),
    [
        ("Llama", [], {}),
        ("Llama", ["attention.n_kv_heads=2"], {"num_key_value_heads": 2}),
        ("Mistral", ["attention.window=5"], {"sliding_window": 5}),
        ("Mistral", ["attention.n_kv_heads=1", "attention.window=3"],
         {"num_key_value_heads": 1, "sliding_window": 3}),
    ],
)  # fmt: skip
def test_llama_and_mistral_logits_equal_hugging_face(family: str, overrides: list[str], theirs: dict):
    cfg, _ = build.compose(["arch=llama", *TINY, "ffn.d_ff=88", "norm.eps=1e-6", *overrides])
    with pytest.warns(UserWarning, match="expansion"):
        ours = build.model(cfg, 97).eval()
    shake(ours)
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**{**sizes, **theirs})
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    reference.load_state_dict(llama.theirs(ours.state_dict()), strict=True)
    with torch.no_grad():
        difference = (ours(TOKENS) - reference(TOKENS).logits).abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_block_equals_torch_encoder_layer(placement: str):
    cfg, _ = build.compose(
        ["arch=original", *TINY, f"residual={placement}", "model.n_layers=1", "model.dropout=0"]
    )
    ours = build.model(cfg, 97).eval()
    shake(ours)
    block = ours.blocks[0]
    attn, ffn, norms = block["attn"], block["ffn"], block["residual"]
    d_ff = ffn.up.out_features
    theirs = nn.TransformerEncoderLayer(
        32, 4, d_ff, 0.0, "relu", batch_first=True, norm_first=placement == "pre"
    ).eval()
    qkv = (attn.q, attn.k, attn.v)
    theirs.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([m.weight for m in qkv]),
            "self_attn.in_proj_bias": torch.cat([m.bias for m in qkv]),
            "self_attn.out_proj.weight": attn.out.weight,
            "self_attn.out_proj.bias": attn.out.bias,
            "linear1.weight": ffn.up.weight,
            "linear1.bias": ffn.up.bias,
            "linear2.weight": ffn.down.weight,
            "linear2.bias": ffn.down.bias,
            "norm1.weight": norms["attn"].norm.weight,
            "norm1.bias": norms["attn"].norm.bias,
            "norm2.weight": norms["ffn"].norm.weight,
            "norm2.bias": norms["ffn"].norm.bias,
        }
    )
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(3))
    mask = nn.Transformer.generate_square_subsequent_mask(16)
    with torch.no_grad():
        assert torch.allclose(
            block(x, Context(TOKENS[:2])), theirs(x, src_mask=mask, is_causal=True), atol=2e-5
        )
