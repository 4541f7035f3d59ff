"""Every yaml of every group composes, is valid, builds and takes a step."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ffnlab import build
from ffnlab.data import Dataset
from ffnlab.validate import validate

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
CHOICES = sorted(
    (path.parent.name, path.stem) for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "hydra"
)
LISTS = {"stream", "probe"}  # groups of which several may be chosen
# Sizes a test can afford. They come last, so that whatever a choice says about layers by number still holds.
TINY = ["model.n_layers=4", "model.d_model=32", "model.n_heads=2", "model.seq_len=16", "train.batch_size=2"]
NEEDS = {("arch", "record42"): ["model.n_layers=12"]}  # it names layers up to 11
VOCAB = 97


def overrides(group: str, choice: str) -> list[str]:
    chosen = f"{group}=[{choice}]" if group in LISTS else f"{group}={choice}"
    return [chosen, *TINY, *NEEDS.get((group, choice), [])]


def take_a_step(cfg: dict[str, Any], vocab_size: int, x: torch.Tensor, y: torch.Tensor) -> torch.nn.Module:
    """Model, optimizer, schedule, probes and logger of `cfg`, and one update on (x, y)."""
    gpt = build.model(cfg, vocab_size)
    optimizer = build.optimizer(cfg, gpt)
    assert 0 <= build.schedule(cfg)(1) <= 1
    assert set(build.probes(cfg)) == {name for name, node in cfg["probe"].items() if isinstance(node, dict)}
    build.logger(cfg)
    before = {name: p.detach().clone() for name, p in gpt.named_parameters()}
    loss = gpt.loss(x, y) / y.numel()
    loss.backward()
    assert torch.isfinite(loss)
    optimizer.set_factor(1.0)
    optimizer.step()
    after = dict(gpt.named_parameters())
    assert any(not torch.equal(before[name], p) for name, p in after.items())
    assert all(torch.isfinite(p).all() for p in after.values())
    assert torch.isfinite(gpt.loss(x, y))
    return gpt


@pytest.fixture(scope="module")
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    return rows[:, :-1], rows[:, 1:]


def speed(choice: tuple[str, str]) -> Any:
    """A bundle's activation is the same part as the activation itself: those are for the slow set."""
    return pytest.param(*choice, marks=pytest.mark.slow) if choice[0] == "arch_act" else choice


@pytest.mark.parametrize(
    ("group", "choice"), [speed(c) for c in CHOICES if c[0] not in {"data", "tokenizer"}]
)
def test_choice_takes_a_step(group: str, choice: str, tokens: tuple[torch.Tensor, torch.Tensor]) -> None:
    if choice == "tensorboard":
        pytest.importorskip("tensorboard")
    cfg, choices = build.compose(overrides(group, choice))
    validate(cfg)
    assert choices.get(group) == choice or group in LISTS
    take_a_step(cfg, VOCAB, *tokens)


@pytest.mark.parametrize("norm", [choice for group, choice in CHOICES if group == "norm"])
def test_norm_can_stand_before_the_ffn_alone(norm: str, tokens: tuple[torch.Tensor, torch.Tensor]) -> None:
    cfg, choices = build.compose([f"norm@norm_ffn={norm}", *TINY])
    validate(cfg)
    assert (choices["norm"], choices["norm@norm_ffn"]) == ("rmsnorm", norm)
    take_a_step(cfg, VOCAB, *tokens)


@pytest.fixture
def own_text(tmp_path: Path) -> dict[str, list[str]]:
    """Overrides that give the sources without text of their own a small local one."""
    text = "\n\n".join(f"The quick brown fox number {i} jumps over {i % 7} lazy dogs." for i in range(2000))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    for name, count in (("train", 5000), ("val", 500)):
        (np.arange(count) % 251).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    local = ["data.path=text", f"data.data_files={tmp_path}/text.txt"]
    plain = [f"data.{key}=null" for key in ("config", "revision", "val_split", "test_split")]
    return {
        "text": [f"data.path={tmp_path}/text.txt"],
        "bin": [f"data.path={tmp_path}", "data.vocab_size=256"],
        "hub": [*local, *plain, "data.column=text"],  # the yaml's other values stay
    }


def learn_from(cfg: dict[str, Any], cache: Path) -> Dataset:
    validate(cfg)
    data = build.dataset(cfg, cache)
    x, y = data.batch(1, cfg["train"]["batch_size"])
    assert x.shape == y.shape == (cfg["train"]["batch_size"], cfg["model"]["seq_len"])
    assert len(list(islice(data.val_batches(2, 1), 1))) == 1
    take_a_step(cfg, data.vocab_size, x, y)
    return data


@pytest.mark.parametrize("choice", [choice for group, choice in CHOICES if group == "data"])
def test_data_takes_a_step(choice: str, own_text: dict[str, list[str]], ffnlab_cache: Path) -> None:
    shipped = {"sotu", "counting"}
    extra = [] if choice in shipped else own_text.get(choice, own_text["hub"])
    tokenizer = [] if choice == "sotu" else ["tokenizer=byte"]
    cfg, _ = build.compose([f"data={choice}", *tokenizer, *extra, *TINY])
    learn_from(cfg, ffnlab_cache)


@pytest.mark.parametrize("choice", [choice for group, choice in CHOICES if group == "tokenizer"])
def test_tokenizer_takes_a_step(choice: str, ffnlab_cache: Path) -> None:
    smaller = ["tokenizer.vocab_size=300"] if choice == "bpe" else []
    cfg, _ = build.compose([f"tokenizer={choice}", "data=counting", "data.n_documents=200", *smaller, *TINY])
    data = learn_from(cfg, ffnlab_cache)
    assert data.tokenizer is not None
