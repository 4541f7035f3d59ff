"""`ffnlab import` against transformers itself: tiny random models, saved as it saves them."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ffnlab import build
from ffnlab.data.tokenizers import GPT2
from ffnlab.errors import UserError
from ffnlab.formats.vocabulary import byte_level
from ffnlab.nn.count import count, total
from ffnlab.nn.gpt import GPT
from ffnlab.probe import Observer, ProbeSettings
from ffnlab.record.checkpoint import load, newest_complete
from ffnlab.record.rundir import load_config, read_info
from ffnlab.trained import Trained, trained_model
from ffnlab.validate import validate
from ffnlab.verbs import export, import_, sample

transformers = pytest.importorskip("transformers")
VOCAB, T = 97, 16
TOKENS = torch.randint(0, VOCAB, (3, T), generator=torch.Generator().manual_seed(1))
GPT2_SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCAB, "n_positions": T}
LLAMA_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": T,
    **dict.fromkeys(("bos_token_id", "eos_token_id")),
}


def theirs(kind: str, **changes: Any) -> Any:
    """A model of transformers in which every parameter is random, gains and biases too."""
    torch.manual_seed(0)
    sizes = GPT2_SIZES if kind == "gpt2" else LLAMA_SIZES
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def imported(folder: Path, out: Path | None) -> Path:
    parser = argparse.ArgumentParser()
    import_.add_arguments(parser)
    assert import_.run(parser.parse_args(["hf", str(folder), *(["--out", str(out)] if out else [])])) == 0
    return out or Path()


def exported(run: Path, out: Path) -> Path:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    assert export.run(parser.parse_args([str(run), "--to", "hf", "--out", str(out)])) == 0
    return out


def opened(run: Path) -> GPT:
    return trained_model(run, load_config(run), vocab_size=0)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """save(model) -> its folder."""

    def call(model: Any, **options: Any) -> Path:
        model.save_pretrained(tmp_path / "model", **options)
        return tmp_path / "model"

    return call


no_tokenizer = pytest.mark.filterwarnings("ignore:.* has no tokenizer that ffnlab can represent")


@no_tokenizer
@pytest.mark.parametrize(
    ("kind", "changes", "options"),
    [
        ("gpt2", {}, {}),
        (
            "gpt2",
            {"activation_function": "relu", "n_inner": 72, "n_head": 2, "layer_norm_epsilon": 1e-3}
            | {"tie_word_embeddings": False},
            {"max_shard_size": "20KB"},
        ),
        (
            "llama",
            {"num_key_value_heads": 2, "rms_norm_eps": 1e-3}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            {"max_shard_size": "20KB"},
        ),
        ("llama", {"tie_word_embeddings": True, "num_attention_heads": 2}, {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}, {}),
        ("mistral", {"sliding_window": 5, "num_key_value_heads": 1}, {}),
        ("arcee", {"num_key_value_heads": 4}, {}),
    ],
)
def test_logits_parameters_and_the_way_back(
    kind: str, changes: dict, options: dict, save: Callable[..., Path], tmp_path: Path
) -> None:
    reference = theirs(kind, **changes)
    run = imported(save(reference, **options), tmp_path / "run")
    ours = opened(run)
    with torch.no_grad():
        assert (ours(TOKENS) - reference(TOKENS).logits).abs().max() < 1e-4
    size = reference.num_parameters()
    assert total(count(ours, T).values()).parameters == read_info(run)["parameters"] == size

    validate(load_config(run))
    back = exported(run, tmp_path / "back")
    again = load_file(back / "model.safetensors")
    before = {name: tensor for name, tensor in reference.state_dict().items() if name in again}
    assert sum(tensor.numel() for tensor in again.values()) == size
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())
    twice = load(newest_complete(imported(back, tmp_path / "twice")) or run)[0]
    assert all(torch.equal(twice[name], tensor) for name, tensor in ours.state_dict().items())


@no_tokenizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_exactly(
    dtype: torch.dtype, save: Callable[..., Path], tmp_path: Path
) -> None:
    reference = theirs("gpt2").to(dtype)
    ours = opened(imported(save(reference), tmp_path / "run"))
    with torch.no_grad():
        assert (ours(TOKENS) - reference.float()(TOKENS).logits).abs().max() < 1e-4


@no_tokenizer
def test_an_imported_model_can_be_probed(save: Callable[..., Path], tmp_path: Path) -> None:
    """Pre-activations and active fractions as transformers' own modules have them."""
    reference = theirs("gpt2", activation_function="relu")
    ours = opened(imported(save(reference), tmp_path / "run"))
    settings = ProbeSettings(
        every=10, every_step_until=20, schedule="every", tokens=12, scan_tokens=0, budget_gib=1.0
    )
    mask = torch.zeros(TOKENS.shape, dtype=torch.bool)
    mask[:, 3:7] = True
    probes = build.probes(build.compose(["probe=[activity,preact]"])[0])
    seen = Observer(ours, probes, settings, steps=0, batch=(TOKENS, mask), scan=None).observe(0)
    pre: list[Tensor] = []
    for block in reference.transformer.h:
        block.mlp.c_fc.register_forward_hook(lambda module, args, out: pre.append(out[mask]))
    with torch.no_grad():
        reference(TOKENS)
    for layer in (0, 1):
        mean = seen.scalars[f"probe/preact/L{layer:02d}/mean"]
        active = seen.scalars[f"probe/activity/L{layer:02d}/active_frac"]
        assert mean == pytest.approx(float(pre[layer].mean()), abs=1e-5)
        assert active == pytest.approx(float((pre[layer] > 0).float().mean()), abs=1e-6)


def test_gpt2_with_its_tokenizer_writes_text(
    save: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(theirs("gpt2", vocab_size=50257, n_embd=8, n_head=2))
    tokenizer = GPT2().fit(())
    vocab = byte_level([tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)])
    assert (vocab["Ġthe"], vocab["<|endoftext|>"]) == (262, 50256)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}}))
    run = imported(folder, tmp_path / "run")
    parser = argparse.ArgumentParser()
    sample.add_arguments(parser)
    sample.run(parser.parse_args([str(run), "--prompt", "The end", "--tokens", "3"]))
    assert "The end" in capsys.readouterr().out
    assert load_config(run)["tokenizer"]["_target_"] == "ffnlab.data.tokenizers.GPT2"
    assert import_.gpt2_tokenizer(folder, 50000) is None  # some of its tokens have no embedding
    swapped = {**vocab, "a": vocab["b"], "b": vocab["a"]}
    (folder / "vocab.json").write_text(json.dumps(swapped))
    assert import_.gpt2_tokenizer(folder, 50257) is None


def test_another_tokenizer_is_left_out_with_a_warning(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(theirs("llama"))
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}}}')
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="takes token ids, not text"):
        imported(folder, None)
    run = tmp_path / "outputs/model"
    assert not (run / "tokenizer.json").exists()
    assert read_info(run)["imported_from"]["model_type"] == "llama"
    assert read_info(run)["status"] == "done"
    with pytest.raises(UserError, match="imported without a tokenizer"):
        Trained(run)


@no_tokenizer
def test_names_of_older_files(save: Callable[..., Path], tmp_path: Path) -> None:
    """Without prefix, with causal masks, the embedding under both names."""
    reference = theirs("gpt2")
    folder = save(reference)
    old = {
        name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()
    }
    masks = {f"h.{i}.attn.{name}": torch.ones(1, 1, T, T) for i in (0, 1) for name in ("bias", "masked_bias")}
    save_file({**old, **masks, "lm_head.weight": old["wte.weight"].clone()}, folder / "model.safetensors")
    ours = opened(imported(folder, tmp_path / "run"))
    with torch.no_grad():
        assert (ours(TOKENS) - reference(TOKENS).logits).abs().max() < 1e-4


def refused(folder: Path, out: Path) -> list[str]:
    """What the UserError says; nothing may be left behind."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(UserError) as error:
        imported(folder, out)
    assert sorted(out.parent.iterdir()) == before
    return error.value.problems


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("gpt2", {"activation_function": "gelu_nu", "scale_attn_by_inverse_layer_idx": True, "n_layer": 1.5},
         ["activation_function", "n_layer", "scale_attn_by_inverse_layer_idx"]),
        ("llama", {"head_dim": 16, "hidden_act": "xielu", "rope_scaling": {"type": "linear", "factor": 2.0},
                   "rms_norm_eps": "x", "hidden_size": None},
         ["head_dim", "hidden_act", "hidden_size", "rms_norm_eps", "rope_scaling.rope_type"]),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": -1}},
         ["rope_parameters.rope_type", "rope_theta"]),
        ("llama", {"model_type": "mamba"}, ["unknown model_type 'mamba'. Did you mean 'llama'? Options"]),
        ("gpt2", {"n_layer": 3}, None),
        ("gpt2", {"n_embd": 36}, None),
        ("gpt2", {"n_head": 5}, ["model.n_heads"]),
    ],
)  # fmt: skip
def test_a_description_that_is_not_supported(
    kind: str, changes: dict, said: list[str] | None, save: Callable[..., Path], tmp_path: Path
) -> None:
    folder = save(theirs(kind))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    problems = refused(folder, tmp_path / "run")
    if said is None:
        assert all(" is missing" in problem or "config.json makes it" in problem for problem in problems)
    else:
        keys = sorted(
            p.removeprefix("config.json: ").split("=")[0].split(":")[0].split(" does")[0] for p in problems
        )
        assert keys == said


def test_a_head_that_is_not_the_embedding(save: Callable[..., Path], tmp_path: Path) -> None:
    folder = save(theirs("gpt2"))
    tensors = load_file(folder / "model.safetensors")
    head = torch.zeros_like(tensors["transformer.wte.weight"])
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    assert "says tie_word_embeddings=true" in refused(folder, tmp_path / "run")[0]


def test_weights_that_are_not_finite(save: Callable[..., Path], tmp_path: Path) -> None:
    reference = theirs("gpt2")
    reference.transformer.ln_f.bias.data[0] = torch.nan
    assert "not finite" in refused(save(reference), tmp_path / "run")[0]


def test_a_place_that_is_taken(save: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    assert "is there already" in refused(save(theirs("gpt2")), tmp_path / "run")[0]
    assert (tmp_path / "run" / "mine.txt").read_text() == "mine"
