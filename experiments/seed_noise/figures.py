"""Reads outputs/seed_noise, writes results/spread.{csv,md}: how far the final validation losses spread."""

from pathlib import Path

import numpy as np
from scipy import stats

from ffnlab.analysis import tables
from ffnlab.analysis.study import last, ran, runs_of, save, script
from ffnlab.analysis.tables import Column, Table

HERE = Path(__file__).parent


def spread(values: np.ndarray) -> dict[str, float]:
    """Mean, standard deviation and its 95 % interval, by (n - 1) s^2 / sigma^2 ~ chi^2 (normal errors)."""
    n, sd = len(values), float(values.std(ddof=1))
    low, high = (sd * np.sqrt((n - 1) / stats.chi2.ppf(p, n - 1)) for p in (0.975, 0.025))
    return {"runs": n, "mean": float(values.mean()), "sd": sd, "sd_low": float(low), "sd_high": float(high)}


def main() -> None:
    runs = runs_of(HERE)
    rows = []
    for arm, by_seed in runs.items():
        losses = [loss for run in by_seed.values() if (loss := last(run, "val/loss")) is not None]
        if len(losses) > 1:
            rows.append({"arm": arm, **spread(np.array(losses))})
    numbers = ("mean", "sd", "sd_low", "sd_high")
    columns = [Column("arm", "what differs", left=True), Column("runs", "runs")]
    columns += [Column(key, key.replace("_", ", "), lambda value: f"{value:.4f}") for key in numbers]
    table = Table("final validation loss (nats per token)", columns, rows)
    note = ran(run for by_seed in runs.values() for run in by_seed.values())
    save(HERE, "spread.csv", tables.to_csv(table))
    save(HERE, "spread.md", f"**{table.title}**\n\n{tables.markdown(table)}\n\n- {note}\n")


if __name__ == "__main__":
    script(main)
