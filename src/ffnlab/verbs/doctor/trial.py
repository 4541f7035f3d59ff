"""A few training steps on a copy: does every parameter get a gradient (E82), how large are gradients and
updates, and do attention and FFN learn alike?
"""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ffnlab import build
from ffnlab.nn.gpt import GPT
from ffnlab.optim import role_of
from ffnlab.train import grad_norm, gradients
from ffnlab.verbs.doctor.finding import Finding, distance, within
from ffnlab.verbs.doctor.subject import Subject

# A head and ways down that start at 0 let gradients through from the outside in: the head has one at step 1,
# `down` and attention's `out` at step 2, what lies before them at step 3.
STEPS = 3
NORM_LOOK, NORM_BAD = 100.0, 1e4  # of the gradient of one parameter, of the mean loss in nats
LOSS_SLACK = 2.0  # nats above ln V at the start
UPDATE_LOOK, UPDATE_BAD = (1e-5, 0.3), (0.0, 1.0)  # |update| / |weight| of a module at the full learning rate
BALANCE_LOOK = (1 / 30, 30.0)  # |gradient of attention| / |gradient of the FFN| of a layer
SUBLAYER = re.compile(r"blocks\.(\d+)\.(attn|ffn)\w*\.")


@dataclass
class Trial:
    """What the steps showed; `norms[k]` holds the norm of every gradient that there was in step k + 1."""

    losses: list[float] = field(default_factory=list)
    norms: list[dict[str, float]] = field(default_factory=list)
    updates: dict[str, float] = field(default_factory=dict)  # by module, in the last step
    zero: set[str] = field(default_factory=set)  # modules that were 0 before the first step

    def first(self, name: str) -> int | None:
        """The first step in which a parameter had a gradient other than 0."""
        return next((k for k, norms in enumerate(self.norms, 1) if norms.get(name, 0.0) != 0.0), None)


def check(subject: Subject) -> Iterator[Finding]:
    model = copy.deepcopy(subject.model)
    trial = take_steps(subject, model)
    yield loss(subject, trial)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield reached(subject, trial, name)
            yield size(subject, trial, name)
    yield from updates(subject, trial)
    yield from balance(subject, trial)


def take_steps(subject: Subject, model: GPT) -> Trial:
    """Train `model` for one step, and on until every parameter had a gradient, for at most STEPS."""
    optimizer = build.optimizer(subject.cfg, model)
    optimizer.load_state_dict(subject.optimizer_state)
    schedule, before_update = build.schedule(subject.cfg), build.regulariser(subject.cfg, model)
    scaler = torch.amp.GradScaler(
        subject.device.type,
        init_scale=2.0**8,  # small: an overflow here would be taken for a fault of the model
        enabled=subject.precision == "fp16",
    )
    weights = {name: p.detach() for name, p in model.named_parameters()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    trial = Trial(zero={module for module, size in lengths(weights).items() if size == 0})
    model.train()
    with subject.own_dropout():
        for number in range(1, STEPS + 1):
            optimizer.set_factor(factor := schedule(min(subject.step + number, subject.train.steps)))
            before_update(subject.step + number)
            mean, _ = gradients(model.loss, [subject.batch(number)], subject.autocast, scaler)
            for inner in optimizer.optimizers:
                scaler.unscale_(inner)
            trial.losses.append(mean)
            trial.norms.append({n: p.grad.norm().item() for n, p in trained.items() if p.grad is not None})
            if not math.isfinite(grad_norm(trained.values(), subject.train.clip)):
                break
            before = {name: weight.clone() for name, weight in weights.items()}
            for inner in optimizer.optimizers:
                scaler.step(inner)
            scaler.update()
            optimizer.zero_grad()
            trial.updates = relative(weights, before, factor)
            if all(trial.first(name) for name in trained):
                break
    return trial


def lengths(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Module -> Euclidean length of all the parameters that are its own."""
    squares: dict[str, float] = {}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, 0.0) + tensor.double().square().sum().item()
    return {module: math.sqrt(square) for module, square in squares.items()}


def relative(now: Mapping[str, Tensor], before: Mapping[str, Tensor], factor: float) -> dict[str, float]:
    """|update| / |weight before it| / `factor` of every module that was not 0."""
    moved = lengths({name: now[name] - before[name] for name in now})
    return {module: moved[module] / old / factor for module, old in lengths(before).items() if old and factor}


def loss(subject: Subject, trial: Trial) -> Finding:
    """The first batch; a model that knows nothing has ln V."""
    first, guess = trial.losses[0], math.log(subject.model.vocab_size)
    high = guess + LOSS_SLACK if subject.step == 0 else math.inf
    verdict = within(first, (0, high), (0, 10 * guess))
    lr = subject.cfg["optim"]["lr"]
    return Finding(
        "loss",
        "one batch",
        first,
        f"about ln V = {guess:.2f}" if subject.step == 0 else "finite",
        verdict,
        "" if verdict == "ok" else f"model.init=gpt2, model.zero_out=true, or optim.lr={lr / 2:g}",
    )


def reached(subject: Subject, trial: Trial, name: str) -> Finding:
    """Whether a parameter gets a gradient, and from which step on."""
    first = trial.first(name)
    last = subject.step + len(trial.norms)
    if first is None:
        kind = "zero" if any(name in norms for norms in trial.norms) else "missing"
        shown = f"{kind} up to step {last}"
    else:
        shown = f"step {subject.step + first}{' (zero start)' if first > 1 else ''}"
    starved = first is None and ".experts." in name  # no token of the batches may have come to this expert
    return Finding(
        "gradient arrives",
        name,
        float(first or 0),
        f"by step {subject.step + STEPS}",
        "ok" if first else "look" if starved else "bad",
        "" if first else gradient_remedy(subject, name, starved),
        shown=shown,
        off=first or math.inf,
    )


def gradient_remedy(subject: Subject, name: str, starved: bool) -> str:
    if starved:
        return "ffn.balance higher, or fewer ffn.n_experts: no token came to it"
    group = {"ffn": "ffn", "attention": "attention", "threshold": "threshold or act"}.get(
        role_of(name), "part"
    )
    return f"another {group}=...: the one that holds it detaches it, saturates or does not use it"


def size(subject: Subject, trial: Trial, name: str) -> Finding:
    """The norm of the gradient in the first step in which there is one."""
    first = trial.first(name)
    value = trial.norms[first - 1][name] if first else 0.0
    verdict = within(value, (0, NORM_LOOK), (0, NORM_BAD))
    clip = "train.clip=1.0, " if subject.train.clip is None else ""
    return Finding(
        "gradient norm",
        name,
        value,
        f"under {NORM_LOOK:g}",
        verdict,
        "" if verdict == "ok" else f"{clip}residual=pre, residual.scale=0.8, or norm=rmsnorm",
        off=value if math.isfinite(value) else math.inf,
    )


def updates(subject: Subject, trial: Trial) -> Iterator[Finding]:
    """|update| / |weight| at the full learning rate.

    What starts at 0 is all update at first, and what lies behind it has a small gradient at first.
    """
    scales, middle = subject.cfg["optim"]["lr_scale"], math.sqrt(UPDATE_LOOK[0] * UPDATE_LOOK[1])
    late = {name.rpartition(".")[0] for name in trial.norms[-1] if (trial.first(name) or 1) > 1}
    for module, change in trial.updates.items():
        if module in trial.zero:
            yield Finding("update / weight", module, change, "any: started at 0")
            continue
        least = 0.0 if module in late else UPDATE_LOOK[0]
        verdict, role = within(change, (least, UPDATE_LOOK[1]), UPDATE_BAD), role_of(f"{module}.weight")
        goal, way = (scales[role] * 0.3, "lower") if change > middle else (scales[role] * 3, "higher")
        yield Finding(
            "update / weight",
            module,
            change,
            f"{least:g} to {UPDATE_LOOK[1]:g}",
            verdict,
            ""
            if verdict == "ok"
            else f"optim.lr_scale.{role}={goal:.2g} (now {scales[role]:g}), or a {way} optim.lr",
            off=distance(change, middle),
        )


def balance(subject: Subject, trial: Trial) -> Iterator[Finding]:
    """How the gradient of each layer is shared out, in the last step."""
    squares: dict[tuple[int, str], float] = {}
    for name, norm in trial.norms[-1].items():
        if match := SUBLAYER.match(name):
            key = int(match[1]), match[2]
            squares[key] = squares.get(key, 0.0) + norm**2
    for layer in sorted({layer for layer, _ in squares}):
        attn, ffn = squares.get((layer, "attn"), 0.0), squares.get((layer, "ffn"), 0.0)
        if not attn or not ffn:
            continue
        value = math.sqrt(attn / ffn)
        verdict = within(value, BALANCE_LOOK, (0, math.inf))
        slow = "ffn" if value > 1 else "attention"
        yield Finding(
            "gradient attn / ffn",
            f"L{layer:02d}",
            value,
            "{:.2g} to {:g}".format(*BALANCE_LOOK),
            verdict,
            "" if verdict == "ok" else f"optim.lr_scale.{slow} higher, or model.init=xavier",
            off=distance(value, 1.0),
        )
