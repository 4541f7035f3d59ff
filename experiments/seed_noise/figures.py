"""Reads outputs/seed_noise, writes results/: how far the final validation losses spread, and every run."""

import numpy as np
from scipy import stats

from ffnlab.analysis import tables
from ffnlab.analysis.conclude import last, ran
from ffnlab.analysis.study import Study, script
from ffnlab.analysis.tables import Column, Table
from ffnlab.errors import UserError

NUMBERS = ("mean", "sd", "sd_low", "sd_high")
SPREAD = [
    Column("arm", "what differs", left=True),
    Column("runs", "runs"),
    *(Column(key, key.replace("_", ", "), lambda value: f"{value:.4f}") for key in NUMBERS),
]
RUNS = [Column(key, key) for key in ("arm", "seed", "loss")]


def spread(values: np.ndarray) -> dict[str, float]:
    """Mean, standard deviation and its 95 % interval, by (n - 1) s^2 / sigma^2 ~ chi^2 (normal errors)."""
    n, sd = len(values), float(values.std(ddof=1))
    low, high = (sd * np.sqrt((n - 1) / stats.chi2.ppf(p, n - 1)) for p in (0.975, 0.025))
    return {"runs": n, "mean": float(values.mean()), "sd": sd, "sd_low": float(low), "sd_high": float(high)}


def main(study: Study) -> None:
    runs = [
        {"arm": arm, "seed": str(seed), "loss": loss}
        for arm, by_seed in study.arms.items()
        for seed, run in by_seed.items()
        if (loss := last(run, "val/loss")) is not None
    ]
    losses = {arm: np.array([row["loss"] for row in runs if row["arm"] == arm]) for arm in study.arms}
    several = {arm: values for arm, values in losses.items() if len(values) > 1}
    if not several:
        raise UserError("no arm has two finished runs, which a spread needs: let more of the study end")
    notes = [ran(run for by_seed in study.arms.values() for run in by_seed.values())]
    if len(several) > 1:
        p = stats.levene(*several.values(), center="median").pvalue
        notes.insert(0, f"are these standard deviations equal? Brown and Forsythe's test: p = {p:.2g}")
    rows = [{"arm": arm, **spread(values)} for arm, values in several.items()]
    table = Table("final validation loss (nats per token)", SPREAD, rows)
    listed = "\n".join(f"- {note}" for note in notes)
    study.save("spread.csv", tables.to_csv(table))
    study.save("spread.md", f"**{table.title}**\n\n{tables.markdown(table)}\n\n{listed}\n")
    study.save("runs.csv", tables.to_csv(Table("every run", RUNS, runs)))


if __name__ == "__main__":
    script(__file__, __doc__, main)
