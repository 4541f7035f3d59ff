"""What the neurons do on one batch: sizes before and after the activation (E71, E81), dead and always-on
neurons (E73), and the two paths of a gated FFN (E70).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ffnlab.nn.init import draw
from ffnlab.probe.base import Captured, Site, layers
from ffnlab.probe.forward import aside, watch
from ffnlab.probe.routing import EXPERT, widths
from ffnlab.verbs.doctor.finding import Finding, distance, within
from ffnlab.verbs.doctor.subject import Subject

MEAN_ABS = math.sqrt(2 / math.pi)  # mean |x| of x ~ N(0, 1), 0.798
PRE_TARGET = 1.0  # mean |pre-activation| (E71)
PRE_LOOK, PRE_BAD = (0.2, 5.0), (0.05, 20.0)  # gpt2 init at D = 128 starts at 0.18, he at 1.13
DEAD_RANGE = 1e-7  # a neuron whose output varies by no more than this over the batch says nothing
DEAD_LOOK, DEAD_BAD = 0.25, 0.9  # shares of a layer's neurons
ALWAYS_ON_LOOK = 0.5  # share of a layer's neurons that the activation never bends
BALANCE_LOOK = (0.1, 10.0)  # rms of act(gate x) over rms of up x


@dataclass(frozen=True)
class Seen:
    """One FFN layer on the batch, over all (token, neuron) pairs; of experts, over their own tokens."""

    pre_abs: float  # mean |pre|
    pre: tuple[float, float]  # mean, sd
    post: tuple[float, float]
    dead_frac: float
    always_on_frac: float
    neurons: int
    balance: float | None  # rms act(gate x) / rms up x; None without a gate


def check(subject: Subject) -> Iterator[Finding]:
    """All findings of one forward pass."""
    for label, seen in look(subject).items():
        yield from sizes(subject, label, seen)
        yield from idle(subject, label, seen)
        if seen.balance is not None:
            yield balanced(label, seen.balance)


def look(subject: Subject) -> dict[str, Seen]:
    """Every FFN layer on batch 1."""
    model = subject.model
    names = [name for name, _ in model.named_modules()]
    of_layer, choosers = layers(names), widths(names)
    sites = {
        label: {
            *(Site(act, side) for act in acts for side in ("input", "output")),
            *(Site(up, "output") for up in ups(acts, names)),
            *({Site(choosers[label], "output")} if label in choosers else ()),
        }
        for label, acts in of_layer.items()
    }
    label_of = {site: label for label, wanted in sites.items() for site in wanted}
    tokens, _ = subject.batch(1)
    held: dict[str, dict[Site, Tensor]] = {label: {} for label in sites}
    found: dict[str, Seen] = {}

    def see(site: Site, rows: Tensor) -> None:
        label = label_of[site]
        held[label][site] = rows.float()
        if held[label].keys() == sites[label]:  # the values of a layer are let go as soon as they are read
            captured = Captured(tokens.flatten(), held.pop(label))
            found[label] = read(model, captured, of_layer[label], names, choosers.get(label))

    with aside(model, subject.autocast):
        watch(model, tokens, set(label_of), see)
    return found


def ups(acts: list[str], names: list[str]) -> list[str]:
    """The `up` beside every activation that has a `gate` beside it."""
    return [
        f"{ffn}.up"
        for ffn in (act.rpartition(".")[0] for act in acts)
        if {f"{ffn}.gate", f"{ffn}.up"} <= {*names}
    ]


def read(
    model: torch.nn.Module, captured: Captured, acts: list[str], names: list[str], chooser: str | None
) -> Seen:
    """The numbers of one layer."""
    pre, post = captured.neurons(acts, "input"), captured.neurons(acts, "output")
    met = ~pre.isnan() if EXPERT.fullmatch(acts[0]) else torch.ones_like(pre, dtype=torch.bool)
    inside, outside = pre[met], post[met]
    lowest = torch.where(met, post, math.inf).amin(0)
    dead = ~((torch.where(met, post, -math.inf).amax(0) - lowest) > DEAD_RANGE)
    if chooser is not None:  # neurons that no token keeps are cut off, which is no fault of theirs
        kept = captured.values[Site(chooser, "output")].max().item() * pre.shape[1]
        dead = dead[: max(1, round(kept))]
    threshold = torch.cat([offset(model.get_submodule(act), captured, act) for act in acts])
    always = (torch.where(met, pre, math.inf).amin(0) > threshold) & met.any(0)
    paths = ups(acts, names)
    return Seen(
        pre_abs=inside.abs().mean().item(),
        pre=(inside.mean().item(), inside.std(correction=0).item()),
        post=(outside.mean().item(), outside.std(correction=0).item()),
        dead_frac=dead.float().mean().item(),
        always_on_frac=always.float().mean().item(),
        neurons=pre.shape[1],
        balance=ratio(outside, captured.neurons(paths, "output")[met]) if len(paths) == len(acts) else None,
    )


def offset(act: Any, captured: Captured, name: str) -> Tensor:
    """The threshold C of every neuron of an activation, 0 without one."""
    pre = captured.values[Site(name, "input")]
    c = getattr(act, "threshold", None)
    return pre.new_zeros(pre.shape[1]) + (c.detach().to(pre) if isinstance(c, Tensor) else 0)


def ratio(gate: Tensor, up: Tensor) -> float:
    return math.sqrt(gate.square().mean().item() / max(up.square().mean().item(), 1e-38))


def sizes(subject: Subject, label: str, seen: Seen) -> Iterator[Finding]:
    """Mean |pre| against its target; means and sds are reported, not judged: ReLU^2 cannot have mean 0."""
    at_start = init_mean(subject, label) if subject.step == 0 else None
    own = f" (init={subject.cfg['model']['init']}: {at_start:.2f})" if at_start is not None else ""
    yield Finding(
        "mean |pre-activation|",
        label,
        seen.pre_abs,
        f"{PRE_TARGET:g}{own}",
        verdict := within(seen.pre_abs, PRE_LOOK, PRE_BAD),
        "" if verdict == "ok" else size_remedy(subject, seen.pre_abs),
        off=distance(seen.pre_abs, PRE_TARGET),
    )
    for name, (mean, sd) in (("pre-activation mean, sd", seen.pre), ("post-activation mean, sd", seen.post)):
        shown, off = f"{mean:.2g}, {sd:.2g}", distance(sd, 1.0)
        yield Finding(name, label, sd, "0, 1 (not judged)", shown=shown, off=off)


def size_remedy(subject: Subject, size: float) -> str:
    if subject.step and not size < PRE_TARGET:
        return "a lower optim.lr, optim.weight_decay=0.1, or norm_ffn=rmsnorm in front of the FFN"
    if not size < PRE_TARGET:
        return "model.init=uniform, or norm_ffn=rmsnorm in front of the FFN"
    return f"model.init=he (now {subject.cfg['model']['init']}), or norm_ffn=rmsnorm in front of the FFN"


def init_mean(subject: Subject, label: str) -> float | None:
    """0.798 s with s^2 = D var(w), what the init gives for input of unit variance (E71); None where the
    pre-activations come out of more than one matrix.
    """
    names = dict(subject.model.named_modules())
    ffn = layers(names)[label][0].rpartition(".")[0]
    weight = getattr(names.get(f"{ffn}.gate", names.get(f"{ffn}.up")), "weight", None)
    if not isinstance(weight, Tensor):
        return None
    rng = torch.Generator().manual_seed(0)
    drawn = draw(weight.shape, subject.cfg["model"]["init"], residual_scale=1.0, rng=rng)
    return MEAN_ABS * drawn.square().mean().sqrt().item() * math.sqrt(weight.shape[1])


def idle(subject: Subject, label: str, seen: Seen) -> Iterator[Finding]:
    """Neurons whose output is the same on every token, and neurons that no token brings below C."""
    dead, always = seen.dead_frac, seen.always_on_frac
    verdict = within(dead, (0, DEAD_LOOK), (0, DEAD_BAD))
    yield Finding(
        "dead neurons",
        label,
        dead,
        f"under {DEAD_LOOK:.0%}",
        verdict,
        "" if verdict == "ok" else dead_remedy(subject.cfg),
        shown=f"{dead:.1%} of {seen.neurons}",
        off=dead,
    )
    verdict = within(always, (0, ALWAYS_ON_LOOK), (0, 1))
    yield Finding(
        "never-negative neurons",
        label,
        always,
        f"under {ALWAYS_ON_LOOK:.0%}",
        verdict,
        "" if verdict == "ok" else "a higher threshold.init (threshold=fixed), or threshold.active_frac=0.5",
        shown=f"{always:.1%} of {seen.neurons}",
        off=always,
    )


def dead_remedy(cfg: Any) -> str:
    """What gives dead neurons a gradient again (E73, E84)."""
    c = cfg["threshold"].get("init")
    found = [f"threshold.init (now {c:g}) lower"] if c else []
    found += ["ffn.balance higher"] if "balance" in cfg["ffn"] else []
    return ", ".join([*found, "act=leaky_relu or act=gelu", "a lower optim.lr"])


def balanced(label: str, balance: float) -> Finding:
    verdict = within(balance, BALANCE_LOOK, (1e-30, math.inf))
    return Finding(
        "GLU paths, gate / up",
        label,
        balance,
        "{:g} to {:g}".format(*BALANCE_LOOK),
        verdict,
        "" if verdict == "ok" else "model.init=xavier or another act: one path drowns the other",
        off=distance(balance, 1.0),
    )
