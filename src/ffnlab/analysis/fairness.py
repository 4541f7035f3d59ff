"""Whether runs can be compared at all, and what makes a comparison unfair."""

from collections.abc import Callable, Mapping
from typing import Any

from ffnlab.analysis.arms import Arm, differing
from ffnlab.analysis.runs import Run
from ffnlab.errors import UserError


def tokens_per_step(run: Run) -> int:
    """Training tokens of one update, over all processes."""
    train = run.config["train"]
    sequences = train["batch_size"] * train["grad_accum"] * run.info.get("processes", 1)
    return sequences * run.config["model"]["seq_len"]


# What should be the same in all runs, and how a run says it.
SAME: dict[str, Callable[[Run], Any]] = {
    "train.steps": lambda run: run.config["train"]["steps"],
    "tokens per step": tokens_per_step,
    "data": lambda run: run.info.get("data", {}).get("fingerprint"),
    "train.eval_batches": lambda run: run.config["train"].get("eval_batches"),
    "precision": lambda run: run.info.get("precision"),
    "device": lambda run: run.info.get("device", {}).get("name"),
    "threads": lambda run: run.info.get("threads"),
}


def unfair(arms: Mapping[str, Arm], metric: str) -> list[str]:
    """One line for everything that should be the same in all runs and is not, and for every arm of several
    configurations.
    """
    lines = [line for what, say in SAME.items() if (line := differs(what, say, arms))]
    stopped = differs("last step", lambda run: int(run.series(metric)[0][-1]), arms)
    if stopped and not differs("train.steps", SAME["train.steps"], arms):  # by train.target_loss
        lines.append(stopped)
    for arm in arms.values():
        if keys := differing(list(arm.runs.values())):
            lines.append(f"arm '{arm.name}' is not one configuration: its runs differ in {', '.join(keys)}")
    return lines


def check_same_task(arms: Mapping[str, Arm], metric: str) -> None:
    """Raises UserError when the losses in nats per token are not of the same tokens."""
    says: dict[str, Callable[[Run], Any]] = {
        "data": SAME["data"],
        "vocabulary": lambda run: run.info.get("vocab_size"),
    }
    problems = [line for what, say in says.items() if (line := differs(what, say, arms))]
    if problems:
        raise UserError(
            *problems,
            f"{metric} counts nats per token and cannot be compared across these: "
            "--metric val/bits_per_byte can, where the text is the same",
        )


def differs(what: str, say: Callable[[Run], Any], arms: Mapping[str, Arm]) -> str | None:
    """'train.steps differs: 300 in a, b; 600 in c', or None where all runs say the same."""
    found: dict[str, dict[str, None]] = {}
    for arm in arms.values():
        for run in arm.runs.values():
            found.setdefault(str(say(run)), {})[arm.name] = None
    if len(found) < 2:
        return None
    return f"{what} differs: " + "; ".join(f"{value} in {', '.join(names)}" for value, names in found.items())
