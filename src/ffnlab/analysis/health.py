"""Whether a run learned anything, as its status and its losses say."""

from collections.abc import Mapping

import numpy as np

from ffnlab.analysis.arms import Arm
from ffnlab.analysis.runs import Run


def ailing(run: Run) -> str | None:
    """What is wrong with the losses of a run, in words; None where they fell."""
    if run.info.get("status") == "diverged":
        return f"diverged ({run.info.get('diverged', 'it does not say where')})"
    for metric in ("val/loss", "train/loss"):
        steps, values = run.series(metric)
        lost = np.flatnonzero(~np.isfinite(values))
        if len(lost):
            return (
                f"{metric} is not finite at {len(lost)} of {len(steps)} steps, the first is {steps[lost[0]]}"
            )
        if len(values) > 1:  # the loss of single batches is asked only where there is no other
            return None if values[-1] < values[0] else unlearned(metric, values)
    return None


def unlearned(metric: str, values: np.ndarray) -> str:
    """'val/loss ended at 11.7200, not below its first, 7.6246'."""
    return f"{metric} ended at {values[-1]:.4f}, not below its first, {values[0]:.4f}"


def ailments(arms: Mapping[str, Arm]) -> list[str]:
    """A line for every run that counts, did not diverge, and yet did not learn."""
    return [
        f"arm '{name}', seed {seed}: {problem} ({run.path}); it counts in the mean"
        for name, arm in arms.items()
        for seed, run in sorted(arm.runs.items())
        if (problem := ailing(run))
    ]
