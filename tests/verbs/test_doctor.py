"""`ffnlab doctor` on models: nothing wrong is found where nothing is, and faults made by hand are found."""

import dataclasses
import json
import math
import re
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from ffnlab import build, cli
from ffnlab.cache import cache_dir
from ffnlab.data import Dataset
from ffnlab.verbs.doctor import lr_range, neurons, stress, trial
from ffnlab.verbs.doctor.finding import Finding
from ffnlab.verbs.doctor.subject import Subject, at_start

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TINY = ["data=counting", "tokenizer.vocab_size=300", "logger=none", "model.n_layers=2", "model.d_model=32"]
TINY += ["model.n_heads=2", "model.seq_len=32", "train.batch_size=8", "train.precision=fp32"]


def start(*overrides: str) -> Subject:
    return at_start([*TINY, *overrides])


def examined(subject: Subject) -> list[Finding]:
    return [finding for check in (neurons, trial, stress) for finding in check.check(subject)]


def at(findings: list[Finding], check: str, where: str) -> Finding:
    (found,) = [f for f in findings if (f.check, f.where) == (check, where)]
    return found


FFNS, ACTS = (sorted(p.stem for p in (CONFIGS / group).glob("*.yaml")) for group in ("ffn", "act"))


@cache
def composed(ffn: str) -> tuple[dict, dict, Dataset]:
    cfg, choices = build.compose([*TINY, f"ffn={ffn}"])
    return cfg, choices, build.dataset(cfg, cache_dir())


ALIKE = {"bilinear", "geglu", "glu", "reglu", "reglu2", "tied_reglu", "paired_init"}  # as swiglu, paired


@pytest.mark.parametrize(
    ("act", "ffn"),
    [
        pytest.param(act, ffn, marks=[pytest.mark.slow] if ffn in ALIKE else [])
        for act, ffn in zip(ACTS, cycle(FFNS), strict=False)
    ],
)
def test_every_variant_and_activation_is_well_at_its_start(act, ffn):
    """No parameter behind the zero start of output matrices is called dead, no expert, no neuron cut off."""
    cfg, choices, data = composed(ffn)
    cfg = {**cfg, "act": yaml.safe_load((CONFIGS / "act" / f"{act}.yaml").read_text())}
    model = build.model(cfg, data.vocab_size)
    subject = Subject(cfg, choices, data, model, torch.device("cpu"), "fp32", 0, {}, "")
    findings = examined(subject)
    assert [f for f in findings if f.verdict == "bad"] == []
    assert all(f.remedy == "" for f in findings if f.verdict == "ok")
    layers = 0 if ffn == "none" else 2
    assert sum(f.check == "dead neurons" for f in findings) == layers
    assert sum(f.check.startswith("stress") for f in findings) == 3 * layers
    gated = ffn in ("bilinear", "geglu", "glu", "reglu", "reglu2", "swiglu")
    assert sum(f.check.startswith("GLU") for f in findings) == 2 * gated
    reached = [f for f in findings if f.check == "gradient arrives"]
    assert {f.where for f in reached} == {name for name, _ in subject.model.named_parameters()}
    # in step 3; where a penalty trains layer 0 from step 1 on, v has one in step 2 already
    assert at(findings, "gradient arrives", "blocks.1.attn.v.weight").measured.endswith("(zero start)")


@pytest.mark.parametrize(
    "choice", ["attention=none", "residual=post", "model.order=parallel", "arch=nanogpt"]
)
def test_other_networks_are_well_at_their_start(choice):
    findings = examined(start(choice))
    assert [f for f in findings if f.verdict == "bad"] == []
    assert any(f.check == "gradient attn / ffn" for f in findings) == (choice != "attention=none")


@pytest.mark.parametrize(
    ("init", "sd"),
    # s of pre ~ N(0, s^2) at input of unit variance, D = 64, F = 256; xavier: s^2 = 2 D / (D + F)
    [("uniform", 0.5), ("he", math.sqrt(2)), ("xavier", math.sqrt(0.4)), ("gpt2", 0.02 * 8)],
)
def test_mean_pre_activation_is_that_of_the_init(init, sd):
    """E71: 0.798 s; 1.13 for he, 0.50 for xavier at 4x."""
    findings = examined(start(f"model.init={init}", "model.d_model=64"))
    for layer in ("L00", "L01"):
        found = at(findings, "mean |pre-activation|", layer)
        assert found.value == pytest.approx(0.798 * sd, rel=0.05)
        told = re.search(r"init=\w+: ([\d.]+)", found.expected)
        assert told is not None
        assert float(told[1]) == pytest.approx(0.798 * sd, rel=0.05)


def test_numbers_are_those_of_the_formulas():
    """Moments and paths against hooks, update and balance against autograd with SGD by hand."""
    subject = start("ffn=swiglu", "optim=sgd", "optim.momentum=0", "model.zero_out=false", "train.clip=null")
    found = examined(subject)
    x, y = subject.batch(1)
    ffn, seen = subject.model.blocks[1]["ffn"], {}
    for name in ("up", "gate", "act"):
        getattr(ffn, name).register_forward_hook(
            lambda m, args, out, name=name: seen.update({name: out.detach()})
        )
    parameters = dict(subject.model.named_parameters())
    mean = subject.model.loss(x, y) / y.numel()
    grads = dict(zip(parameters, torch.autograd.grad(mean, list(parameters.values())), strict=True))
    rms = {name: value.square().mean().sqrt().item() for name, value in seen.items()}
    assert at(found, "mean |pre-activation|", "L01").value == pytest.approx(seen["gate"].abs().mean().item())
    assert at(found, "pre-activation mean, sd", "L01").value == pytest.approx(
        seen["gate"].std().item(), rel=1e-3
    )
    assert at(found, "GLU paths, gate / up", "L01").value == pytest.approx(rms["act"] / rms["up"], rel=1e-4)
    assert at(found, "loss", "one batch").value == pytest.approx(mean.item(), rel=1e-5)
    name = "blocks.0.attn.q"
    weight, grad = parameters[f"{name}.weight"].detach(), grads[f"{name}.weight"]
    step = subject.cfg["optim"]["lr"] * grad
    assert at(found, "gradient norm", f"{name}.weight").value == pytest.approx(grad.norm().item(), rel=1e-4)
    assert at(found, "update / weight", name).value == pytest.approx(
        (step.norm() / weight.norm()).item(), rel=1e-3
    )
    norms = {
        role: math.sqrt(
            sum(g.square().sum().item() for n, g in grads.items() if n.startswith(f"blocks.1.{role}."))
        )
        for role in ("attn", "ffn")
    }
    assert at(found, "gradient attn / ffn", "L01").value == pytest.approx(
        norms["attn"] / norms["ffn"], rel=1e-4
    )


def test_an_examination_changes_nothing():
    subject = start("ffn=moe", "model.dropout=0.1", "ffn.l1=0.1")
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    random = torch.get_rng_state()
    examined(subject)
    assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())
    assert all(p.grad is None for p in subject.model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert subject.model.training
    assert not any(m._forward_hooks for m in subject.model.modules())


def test_weights_a_hundred_times_too_large():
    subject = start()
    with torch.no_grad():
        subject.model.blocks[1]["ffn"].up.weight.mul_(100)
    findings = examined(subject)
    large = at(findings, "mean |pre-activation|", "L01")
    assert (large.verdict, at(findings, "mean |pre-activation|", "L00").verdict) == ("bad", "ok")
    assert large.remedy.startswith("model.init=uniform")


def test_a_parameter_without_a_gradient():
    subject = start()
    up = subject.model.blocks[1]["ffn"].up
    up.forward = lambda x: nn.functional.linear(x, up.weight.detach())
    bad = [f for f in examined(subject) if f.verdict == "bad"]
    assert [(f.check, f.where) for f in bad] == [("gradient arrives", "blocks.1.ffn.up.weight")]
    assert bad[0].measured == "missing up to step 3"
    assert "ffn=" in bad[0].remedy


@pytest.mark.parametrize("act", ["relu2", "gelu", "star_relu"])
def test_a_threshold_that_silences_a_layer(act):
    dead = at(examined(start(f"act={act}", "threshold=fixed", "threshold.init=100")), "dead neurons", "L01")
    assert (dead.value, dead.verdict) == (1.0, "bad")
    assert "threshold.init (now 100) lower" in dead.remedy


def test_a_threshold_below_all_pre_activations():
    findings = examined(start("threshold=learned", "threshold.scope=neuron", "threshold.init=-100"))
    always = at(findings, "never-negative neurons", "L00")
    assert (always.value, always.verdict) == (1.0, "look")
    assert "threshold" in always.remedy


def test_an_expert_without_tokens_is_not_always_on():
    subject = start("ffn=moe")
    with torch.no_grad():
        subject.model.get_parameter("blocks.0.ffn.router.weight").zero_()  # the first two get all
    findings = examined(subject)
    assert at(findings, "never-negative neurons", "L00").value < 0.1
    assert at(findings, "dead neurons", "L00").value >= 6 / 8


def test_neurons_that_no_token_keeps_are_not_dead():
    subject = start("ffn=dynamic")
    with torch.no_grad():
        subject.model.get_parameter("blocks.0.ffn.width.controller.weight").zero_()
        subject.model.get_parameter("blocks.0.ffn.width.controller.bias").fill_(-2.0)  # keeps 12 %
    assert at([*neurons.check(subject)], "dead neurons", "L00").verdict == "ok"


def test_updates_are_those_of_the_full_rate():
    now, before = {"m.w": torch.tensor(1.1)}, {"m.w": torch.tensor(1.0)}
    assert trial.relative(now, before, 0.5) == {"m": pytest.approx(0.2)}


def test_what_lies_behind_a_zero_start_may_move_little():
    name = "blocks.0.attn.q"
    for norms, verdict in ((0.0, "ok"), (1e-3, "look")):
        shown = trial.Trial(norms=[{f"{name}.weight": norms}, {f"{name}.weight": 1e-3}], updates={name: 1e-7})
        (found,) = trial.updates(start(), shown)
        assert found.verdict == verdict


@pytest.mark.parametrize(("above", "verdict"), [(1.9, "ok"), (2.1, "look")])
def test_a_first_loss_far_above_ln_v(above, verdict):
    subject = start()
    shown = trial.Trial(losses=[math.log(subject.model.vocab_size) + above])
    assert trial.loss(subject, shown).verdict == verdict


def test_the_stress_is_seen_in_front_of_the_activation_too():
    subject = start("act=tanh")
    with torch.no_grad():
        subject.model.blocks[1]["ffn"].up.weight.mul_(20)
    assert at([*stress.check(subject)], "stress input, fp32", "L01").value > 100


def test_a_layer_that_overflows_in_fp16():
    """up x 20: sd 100 on the stress input, so the largest of 128,000 squares is about (450)^2 > 65504."""
    subject = start()
    with torch.no_grad():
        subject.model.blocks[1]["ffn"].up.weight.mul_(20)
    findings = [*stress.check(subject)]
    assert {(f.check, f.where) for f in findings if f.verdict != "ok"} == {("stress input, fp16", "L01")}
    assert at(findings, "stress input, fp16", "L01").verdict == "look"
    trained_so = [*stress.check(dataclasses.replace(subject, precision="fp16"))]
    assert at(trained_so, "stress input, fp16", "L01").verdict == "bad"
    assert at(trained_so, "stress input, fp32", "L01").value > 65504


def test_updates_larger_than_the_weights():
    findings = examined(start("optim=adamw", "optim.lr=1"))
    assert at(findings, "update / weight", "blocks.0.attn.v").verdict == "bad"
    assert "optim.lr_scale.attention=0.3" in at(findings, "update / weight", "blocks.0.attn.v").remedy


def test_a_gate_that_drowns_its_partner():
    subject = start("ffn=swiglu")
    with torch.no_grad():
        subject.model.blocks[0]["ffn"].up.weight.mul_(1e-3)
    findings = examined(subject)
    assert [f.where for f in findings if f.check.startswith("GLU") and f.verdict == "look"] == ["L00"]


def test_landmarks_of_a_range_test():
    """Flat, steep between losses 10 and 15, flat, then up from loss 30 on: no fall beyond it counts."""
    curve = [6.0] * 10 + [5.5, 4.5, 3.5, 3.0, 2.8] + [2.7] * 15 + [9.0] * 5 + [1.0] * 5
    rates = [2.0**k for k in range(40)]
    steepest, blown_up = lr_range.landmarks(rates, curve)
    assert 2.0**9 <= steepest <= 2.0**15
    assert blown_up == 2.0**29  # the update before the first high loss
    assert lr_range.landmarks(rates, [5.0, 4.0, math.nan])[1] == rates[1]
    assert lr_range.landmarks(rates, curve[:30])[1] == math.inf
    assert lr_range.landmarks(rates, [math.nan]) == (0.0, 0.0)


@pytest.mark.parametrize(("lr", "verdict"), [(0.001, "ok"), (100, "bad")])
def test_the_range_test_tells_a_rate_that_is_too_high(lr, verdict):
    _, blow_up = lr_range.check(start("optim=adamw", f"optim.lr={lr}", "train.batch_size=2"))
    assert blow_up.verdict == verdict
    assert verdict == "ok" or "optim.lr=" in blow_up.remedy


def test_the_table_and_its_remedies(capsys):
    assert cli.main(["doctor", *TINY, "threshold=fixed", "threshold.init=100"]) == 0
    text = capsys.readouterr().out
    assert text.isascii()
    assert "mlp with relu2, 2 layers x 32, at initialisation" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("dead neurons")]
    assert len(lines) == 1
    assert lines[0][-1] == "bad"
    assert "bad: dead neurons, L00: threshold.init (now 100) lower" in text


def test_json_holds_every_layer_and_parameter(capsys):
    assert cli.main(["doctor", "--json", *TINY]) == 0
    report = json.loads(capsys.readouterr().out)
    keys = {"check", "where", "value", "measured", "expected", "verdict", "remedy"}
    assert all(finding.keys() == keys for finding in report["findings"])
    assert {f["where"] for f in report["findings"] if f["check"] == "dead neurons"} == {"L00", "L01"}


def test_json_has_a_word_for_what_is_no_number():
    assert Finding("loss", "one batch", math.nan, "finite").plain()["value"] == "nan"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["nowhere"],
            "expected a run directory, which train.py makes (out=...), or overrides as for it: KEY=VALUE",
        ),
        (["ffn=swigloo"], "Did you mean 'swiglu'?"),
        (["{run}", "seed=1"], "either one run directory"),
        (["{run}"], "holds no run"),
    ],
)
def test_wrong_input(words, told, capsys, tmp_path):
    assert cli.main(["doctor", *(word.format(run=tmp_path) for word in words)]) == 1
    assert told in capsys.readouterr().err
