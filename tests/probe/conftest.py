"""A small model of real parts, as build.py puts them together."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ffnlab import build
from ffnlab.nn.act.relu import ReLU2
from ffnlab.nn.attention import Causal
from ffnlab.nn.ffn.mlp import MLP
from ffnlab.nn.gpt import GPT, Block, ModelSettings
from ffnlab.nn.head import Head
from ffnlab.nn.norm import RMSNorm
from ffnlab.nn.residual import PreNorm
from ffnlab.nn.skip import UNet
from ffnlab.nn.stream import Backout, Smear, X0Lambdas
from ffnlab.nn.threshold import NoThreshold
from ffnlab.probe import Observer, Probe, ProbeSettings

D, F, T, LAYERS, VOCAB = 16, 40, 12, 4, 61


def make_gpt(
    *,
    act: Callable[[int], nn.Module] = lambda d_ff: ReLU2(d_ff=d_ff),
    threshold: Callable[[nn.Module, int], nn.Module] | None = None,
    ffn: Callable[..., nn.Module] = MLP,
    bias: frozenset[str] = frozenset(),
    dropout: float = 0.0,
    gate: str = "sigmoid",
    scale: float | str = 1.0,
    carry: float | str = 1.0,
    seed: int = 0,
) -> GPT:
    """Four layers of width 16 with every stream part; weights are torch's defaults, drawn with `seed`."""
    torch.manual_seed(seed)
    threshold = threshold or NoThreshold()
    settings = ModelSettings(
        seq_len=T,
        d_model=D,
        n_layers=LAYERS,
        n_heads=2,
        order="attn_ffn",
        tie_head=False,
        softcap=None,
        pad_vocab_to=1,
        mask_padding=True,
        dropout=dropout,
        init="uniform",
        zero_out=False,
        value_embeddings=[],
        drop_attn=[],
        drop_ffn=[],
    )
    norm = partial(RMSNorm, D, gain=False, eps=1e-6)

    def block(layer: int) -> Block:
        attn = Causal(
            layer=layer,
            d_model=D,
            n_heads=2,
            seq_len=T,
            dropout=dropout,
            value_embedding=False,
            position="rope",
            rope_base=1e4,
            rope_frac=1.0,
            qk_norm=True,
            bias=frozenset(),
            scale=None,
            gate=False,
            n_kv_heads=None,
            window=None,
            long_layers=[],
        )
        sublayers = {
            "attn": attn,
            "ffn": ffn(
                d_model=D, d_ff=F, make_act=lambda n: threshold(act(n), n), bias=bias, dropout=dropout
            ),
        }
        options = {"d_model": D, "scale": scale, "scale_init": 1.0, "carry": carry, "dropout": dropout}
        return Block(sublayers, {role: PreNorm(norm, **options) for role in sublayers})

    sizes = {"d_model": D, "n_layers": LAYERS}
    parts: dict[str, nn.Module] = {
        "skip": UNet(**sizes, pairs=None, drop=[], gate=gate, init=-1.5),
        "x0_lambdas": X0Lambdas(**sizes),
        "backout": Backout(**sizes, layer=None, init=0.25),
        "smear": Smear(**sizes),
    }
    head = Head(D, VOCAB, vocab_size=VOCAB, softcap=None, mask_padding=True)
    return GPT(
        settings,
        vocab_size=VOCAB,
        blocks=[block(i) for i in range(LAYERS)],
        parts=parts,
        norm=norm(),
        embed=nn.Embedding(VOCAB, D),
        head=head,
    )


def probe_batch(windows: int = 3, positions: int = 8) -> tuple[Tensor, Tensor]:
    """Tokens (W, T) and a mask with `positions` marks at mixed places, none at the end of a window."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (windows, T), generator=random)
    places = torch.randperm(windows * (T - 1), generator=random)[:positions]
    mask = torch.zeros(windows, T - 1, dtype=torch.bool)
    mask.view(-1)[places] = True
    return tokens, torch.cat([mask, torch.zeros(windows, 1, dtype=torch.bool)], dim=1)


def settings(**changes: object) -> ProbeSettings:
    """The settings of configs/train.yaml, small."""
    values = {
        "every": 10,
        "every_step_until": 20,
        "schedule": "every",
        "tokens": 8,
        "scan_tokens": 5 * T,
        "budget_gib": 1.0,
    }
    return ProbeSettings(**{**values, **changes})  # type: ignore[arg-type]


TINY = ["model.n_layers=4", "model.d_model=32", "model.n_heads=2", "model.seq_len=16", "model.zero_out=false"]


def look_at(*overrides: str, autocast: Callable = nullcontext):
    """Model, tokens (3, 16) of which 20 are probed, the mask of these, and what the probes see on them and on
    a scan.
    """
    cfg, _ = build.compose([*TINY, *overrides])
    gpt = build.model(cfg, 97)
    tokens = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 16, dtype=torch.bool)
    mask[0, ::2] = mask[1, ::2] = mask[2, 12:] = True
    observer = Observer(
        gpt,
        build.probes(cfg),
        build.probe_settings(cfg),
        steps=10,
        batch=(tokens, mask),
        scan=tokens,
        autocast=autocast,
    )
    return gpt, tokens, mask, observer.observe(0), observer.scan(0)


def ordinary_pass(model: nn.Module, tokens: Tensor, names: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """The first argument and the output of the named modules in an ordinary forward pass in eval mode."""
    seen = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
            seen[name] = (args[0].detach(), output.detach())

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    with torch.no_grad():
        model.eval()(tokens)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.fixture
def look() -> Callable:
    """`look_at`."""
    return look_at


@pytest.fixture
def passed() -> Callable[..., dict[str, tuple[Tensor, Tensor]]]:
    """`ordinary_pass`."""
    return ordinary_pass


@pytest.fixture
def gpt() -> Callable[..., GPT]:
    """`make_gpt`."""
    return make_gpt


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    """The probe batch of `observer`."""
    return probe_batch()


@pytest.fixture
def scan() -> Tensor:
    """The scan batch of `observer`: 60 tokens."""
    return torch.randint(VOCAB, (5, T), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def observer(batch: tuple[Tensor, Tensor], scan: Tensor) -> Callable[..., Observer]:
    """(model, probes by name, changed settings and arguments of Observer) -> Observer of a 300-step run."""

    def make(model: nn.Module, probes: dict[str, Probe], **changes: object) -> Observer:
        arguments: dict = {"steps": 300, "batch": batch, "scan": scan, "autocast": nullcontext}
        arguments |= {key: changes.pop(key) for key in arguments if key in changes}
        return Observer(model, probes, settings(**changes), **arguments)

    return make
