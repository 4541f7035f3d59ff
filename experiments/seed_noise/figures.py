"""Reads outputs/seed_noise, writes results/spread.{csv,md}: how far the final validation losses spread."""

import numpy as np
from scipy import stats

from ffnlab.analysis import tables
from ffnlab.analysis.conclude import last, ran
from ffnlab.analysis.study import Study, script
from ffnlab.analysis.tables import Column, Table
from ffnlab.errors import UserError


def spread(values: np.ndarray) -> dict[str, float]:
    """Mean, standard deviation and its 95 % interval, by (n - 1) s^2 / sigma^2 ~ chi^2 (normal errors)."""
    n, sd = len(values), float(values.std(ddof=1))
    low, high = (sd * np.sqrt((n - 1) / stats.chi2.ppf(p, n - 1)) for p in (0.975, 0.025))
    return {"runs": n, "mean": float(values.mean()), "sd": sd, "sd_low": float(low), "sd_high": float(high)}


def main(study: Study) -> None:
    rows = []
    for arm, by_seed in study.arms.items():
        losses = [loss for run in by_seed.values() if (loss := last(run, "val/loss")) is not None]
        if len(losses) > 1:
            rows.append({"arm": arm, **spread(np.array(losses))})
    if not rows:
        raise UserError("no arm has two finished runs, which a spread needs: let more of the study end")
    numbers = ("mean", "sd", "sd_low", "sd_high")
    columns = [Column("arm", "what differs", left=True), Column("runs", "runs")]
    columns += [Column(key, key.replace("_", ", "), lambda value: f"{value:.4f}") for key in numbers]
    table = Table("final validation loss (nats per token)", columns, rows)
    note = ran(run for by_seed in study.arms.values() for run in by_seed.values())
    study.save("spread.csv", tables.to_csv(table))
    study.save("spread.md", f"**{table.title}**\n\n{tables.markdown(table)}\n\n- {note}\n")


if __name__ == "__main__":
    script(__file__, __doc__, main)
