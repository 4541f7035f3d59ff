"""What a run says about itself: run.json and a few lines before the first step, the closing lines after the
last.
"""

import platform
import shlex
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ffnlab
from ffnlab.device import instruction_set
from ffnlab.errors import UserError
from ffnlab.layers import ffns
from ffnlab.nn.count import TRAINING
from ffnlab.nn.rate import cpu_name
from ffnlab.session import Session
from ffnlab.train import Row
from ffnlab.withheld import command

MIB = 2**20
SAID_FROM = 50 * MIB  # a record from this size on is announced


def facts(
    session: Session, choices: Mapping[str, Any], threads: int, flops: int, rate: float
) -> dict[str, Any]:
    """What run.json says about a run before its first step."""
    return {
        "command": command(),
        "host": platform.node(),
        "choices": {
            **{group: name for group, name in choices.items() if not group.startswith("hydra/")},
            "stream": list(session.cfg["stream"]),
        },
        "seeds": {"seed": session.cfg["seed"], "data": session.cfg["data"]["seed"]},
        "threads": threads,
        "processes": session.processes.size,
        "instruction_set": instruction_set(),
        "device": {"type": session.device.type, "name": device_name(session.device)},
        "precision": session.precision,
        "parameters": sum(p.numel() for p in session.model.parameters()),
        "flops_per_token": flops,
        "skippable_flops_per_token": skippable(session.model),
        "token_share": token_share(session.model),
        "matrix_rate_flops_per_s": rate,
        "versions": {
            "ffnlab": ffnlab.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "git": git_state(),
        "vocab_size": session.data.vocab_size,
        "data": session.data.manifest,
    }


def skippable(model: nn.Module) -> dict[str, int]:
    """What a sparse kernel could skip in the training of each layer, per token, if no neuron were active
    (`FeedForward.skippable_flops_per_token`).
    """
    return {label: ffn.skippable_flops_per_token() for label, ffn in ffns(model).items()}


def token_share(model: nn.Module) -> dict[str, float]:
    """The share of the tokens that meet a neuron, by layer: 1, or top_k / n_experts."""
    shares = {label: [share for _, share in ffn.made_of()] for label, ffn in ffns(model).items()}
    return {label: float(min(found)) for label, found in shares.items()}


def device_name(device: torch.device) -> str:
    """The accelerator's or the processor's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout that this code runs from, and whether it was changed; None outside a
    checkout.
    """

    def git(*args: str) -> str:
        root = Path(__file__).resolve().parent
        return subprocess.run(
            ("git", "-C", str(root), *args), capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", str(Path(__file__).resolve())
        )  # a repository around site-packages is not ours
        return {
            "commit": git("rev-parse", "HEAD"),
            "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def check_same_run(session: Session, before: Mapping[str, Any]) -> None:
    """What a resume must share with the run that it continues beyond the configuration: data, processes,
    machine.
    """
    tokens, size = before.get("data", {}).get("fingerprint"), before.get("processes")
    problems = []
    if tokens is not None and tokens != session.data.fingerprint:
        problems.append(
            "the data of this run have changed since it began: the same tokens are needed to resume it"
        )
    if size is not None and size != session.processes.size:
        problems.append(
            f"this run was begun with {size} processes; {session.processes.size} would change its batches: "
            f"use torchrun --nproc_per_node={size}"
        )
    if problems:
        raise UserError(*problems)
    lost = session.kernels.mode == "auto" and "parameters" in before and before.get("kernels") is None
    if lost:
        warnings.warn(
            "run.json lacks the times by which ffn.kernel=auto decides: timed anew, not bit-exact",
            stacklevel=2,
        )
    if differing := other_machine(before, session.device):
        warnings.warn(f"resumed with another {'; '.join(differing)}: not bit-exact", stacklevel=2)


def other_machine(before: Mapping[str, Any], device: torch.device) -> list[str]:
    """What the bits of a result depend on and is not as run.json says; threads are part of the
    configuration.
    """
    there, versions = before.get("device", {}), before.get("versions", {})
    pairs = {
        "device": (there.get("type"), device.type),
        "processor": (there.get("name"), device_name(device)),
        "instruction set": (before.get("instruction_set"), instruction_set()),
        "torch": (versions.get("torch"), torch.__version__),
    }
    return [
        f"{what} ({now} instead of {then})" for what, (then, now) in pairs.items() if then not in (None, now)
    ]


def token_texts(session: Session) -> dict[str, Any] | None:
    """tokens.json: the text of every token that is probed or scanned, by its id, and the length of a window;
    None where nobody looks or the data have no tokenizer.
    """
    tokenizer, fixed = session.data.tokenizer, session.observer.fixed()
    if tokenizer is None or not fixed:
        return None
    ids = {
        int(i) for name in ("probe_batch/token", "scan/token") if name in fixed for i in fixed[name][0].flat
    }
    text = {str(i): tokenizer.token_bytes(i).decode(errors="replace") for i in sorted(ids)}
    return {"seq_len": session.data.seq_len, "text": text}


def opening(session: Session) -> list[str]:
    """What the run will leave on the disk, where that is much or asked for."""
    lines, size, each = [], session.record_bytes, session.checkpoint.weights_every
    if size > SAID_FROM:
        budget = session.probe.budget_gib * 1024
        lines.append(
            f"the record will take {size / MIB:.0f} MiB (budget {budget:.0f} MiB) before compression"
        )
    if each is not None:
        weights = sum(p.numel() * p.element_size() for p in session.model.parameters()) / MIB
        count = session.train.steps // each + 1
        lines.append(
            f"{count} snapshots of the weights, {weights:.1f} MiB each, will take {count * weights:.0f} MiB "
            f"(checkpoint.weights_every={each})"
        )
    return lines


def closing(info: Mapping[str, Any], final: Row, out: Path) -> list[str]:
    """The lines at the end of a run: what came out, what it cost, and what to type next."""
    seconds, probes = info["timings"]["total_s"], info["timings"]["probe_s"]
    largest = sorted(info["timings"]["probes"].items(), key=lambda item: -item[1])[:4]
    parts = " (" + ", ".join(f"{name} {s:.1f}" for name, s in largest) + ")" if probes >= 0.1 else ""
    rate = info["matrix_rate_flops_per_s"] * info["processes"]
    ceiling = (
        f"the {rate / 1e9:.0f} GFLOP/s of {info['precision']} matrix products ({info['threads']} threads)"
    )
    achieved = TRAINING * info["flops_per_token"] * info["timings"]["median_tok_per_s"]
    quality = f"val/loss {final['val/loss']:.4f} nats per token" if "val/loss" in final else "not evaluated"
    if "val/bits_per_byte" in final:
        quality += f", {final['val/bits_per_byte']:.4f} bits per byte"
    return [
        f"{info['status']}: {out}",
        f"  {quality} at step {final.get('step', 0)}, {final.get('tokens', 0):,} tokens in {seconds:.0f} s",
        f"  {info['parameters']:,} parameters, {info['flops_per_token']:,} FLOPs per token forward, "
        f"{TRAINING} times that in training",
        f"  {achieved / 1e9:.0f} GFLOP/s at the median step: {achieved / rate:.0%} of {ceiling}",
        f"  probes took {probes:.1f} s: {probes / max(seconds, 1e-9):.1%} of the run{parts}",
        "next:",
        f"  ffnlab sample {out} --tokens 100",
        f"  ffnlab summary {' '.join(overrides(info['command']))}",
        "  python train.py -m ffn=mlp,swiglu act=gelu,relu2 seed=0,1",
    ]


def overrides(command: list[str]) -> list[str]:
    """The overrides of a `train.py` command that say what the model is."""
    other = (
        "-",
        "hydra",
        "out=",
        "logger",
        "study=",
        "arm=",
        "seed=",
        "data",
        "probe",
        "checkpoint",
        "plugins=",
    )
    return [shlex.quote(o) for o in command[1:] if "=" in o and not o.lstrip("+~").startswith(other)]
