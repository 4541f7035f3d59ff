"""The same start for every variant: each weight is drawn on the CPU in fp32 from a generator seeded by
(seed, its name).

Two models with one seed share every parameter of equal name and shape to the bit, whatever else differs
between them.
"""

import hashlib
import math
import re
from functools import partial

import torch
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.nn.head import Head

SCHEMES = ("uniform", "normal", "he", "xavier", "gpt2")
OUTPUTS = re.compile(  # projections back into the stream
    r".*(\.down(\.out|\.plus|\.minus)?|\.attn\.out|\.skip\.join_\w+)"
)


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator seeded by sha256 of "seed:name"."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)


def draw(shape: torch.Size, scheme: str, *, residual_scale: float, rng: torch.Generator) -> Tensor:
    """A weight (out, in). uniform: U(+-sqrt(3) s), normal: N(0, s^2), both s = 0.5/sqrt(in)
    (modded-nanogpt); he: N(0, 2/in);
    xavier: U(+-sqrt(6/(in+out))); gpt2: N(0, 0.02^2), in output projections divided by sqrt(2 n_layers)
    (`residual_scale`)."""
    n_out, n_in = shape
    s = 0.5 / math.sqrt(n_in)
    if scheme == "uniform":
        return torch.empty(shape).uniform_(-math.sqrt(3) * s, math.sqrt(3) * s, generator=rng)
    if scheme == "xavier":
        bound = math.sqrt(6 / (n_in + n_out))
        return torch.empty(shape).uniform_(-bound, bound, generator=rng)
    sd = {"normal": s, "he": math.sqrt(2 / n_in), "gpt2": 0.02 * residual_scale}[scheme]
    return torch.empty(shape).normal_(0, sd, generator=rng)


def embedding_sd(scheme: str, d_model: int, tied: bool) -> float:
    """1; 1/sqrt(D) where it is the head too, whose logits then start at about sd 1; 0.02 for gpt2."""
    return 0.02 if scheme == "gpt2" else d_model**-0.5 if tied else 1.0


@torch.no_grad()
def initialise(model: nn.Module, *, seed: int, scheme: str, zero_out: bool, n_layers: int) -> None:
    """Draw every Linear and Embedding of the model; biases 0; with `zero_out` output projections and an
    untied head 0.

    A weight of several names (a tied head, a shared FFN) is drawn once, under the first of them. A Linear
    with a method `start` makes its weight itself, out of what the function it is given draws for it.
    All other parameters (gains, gates, lambdas, thresholds) keep the start that their part gave them.
    """
    if scheme not in SCHEMES:
        raise UserError(f"model.init={scheme!r}: expected one of {', '.join(SCHEMES)}")
    done: set[int] = set()
    heads = {id(m.weight) for m in model.modules() if isinstance(m, Head)}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding) or id(module.weight) in done:
            continue
        done.add(id(module.weight))
        rng = generator(seed, f"{name}.weight")
        if isinstance(module, nn.Embedding):
            sd = embedding_sd(scheme, module.embedding_dim, tied=id(module.weight) in heads)
            module.weight.copy_(torch.empty(module.weight.shape).normal_(0, sd, generator=rng))
            continue
        output = OUTPUTS.fullmatch(name) is not None
        if zero_out and (output or isinstance(module, Head)):
            module.weight.zero_()
        else:
            scale = 1 / math.sqrt(2 * n_layers) if output else 1.0
            own = partial(draw, scheme=scheme, residual_scale=scale, rng=rng)
            start = getattr(module, "start", None)
            module.weight.copy_(start(own) if start else own(module.weight.shape))
        if module.bias is not None:
            module.bias.zero_()
