"""A comparison on paper: two tables, the lines that say how to read them, and all of it as plain values."""

import statistics
from dataclasses import asdict
from typing import Any

from ffnlab.analysis.compare import Comparison, status
from ffnlab.analysis.contrasts import FLIPS_FROM, LEAST_SEEDS, counted
from ffnlab.analysis.tables import Column, Table

UNITS = {"loss": " nats per token", "bits_per_byte": " bits per byte"}


def rows(comparison: Comparison) -> list[dict[str, Any]]:
    """One flat row of plain values per arm: its runs, its contrast with the baseline, its cost."""
    found = []
    for name, arm in comparison.arms.items():
        values = list(comparison.values[name].values())
        contrast = comparison.analysis.contrasts.get(name)
        cost = asdict(comparison.costs[name])
        equal, to_loss = comparison.costs[name].baseline_steps, cost.pop("to_loss")
        found.append(
            {
                "arm": name,
                "n": len(values),
                "diverged": len(arm.diverged),
                "mean": statistics.fmean(values) if values else None,
                "sd": statistics.stdev(values) if len(values) > 1 else None,
                **(asdict(contrast) if contrast else {}),
                "verdict": verdict(comparison, name),
                **cost,
                "baseline_steps": equal.step if equal else None,
                "baseline_steps_beyond": equal.beyond if equal else None,
                **{f"to_loss_{key}": value for key, value in (to_loss or {}).items()},
            }
        )
    return found


def verdict(comparison: Comparison, name: str) -> str:
    """The verdict on an arm, with the number of runs that it leaves out."""
    contrast = comparison.analysis.contrasts.get(name)
    word = "baseline" if name == comparison.question.baseline else contrast.verdict if contrast else ""
    lost, n = len(comparison.arms[name].diverged), len(comparison.values[name])
    return "; ".join(part for part in (word, f"{lost} of {lost + n} diverged" if lost else "") if part)


def flat(comparison: Comparison) -> Table:
    """Everything by arm, for files."""
    found = rows(comparison)
    keys = dict.fromkeys(key for row in found for key in row)
    return Table(comparison.metric, [Column(key, key) for key in keys], found)


def effects(comparison: Comparison) -> Table:
    """What comes out: means over seeds, differences from the baseline, tests, verdicts."""
    level = f"{100 * (1 - comparison.question.alpha):g} % CI"
    columns = [
        Column("arm", "arm", left=True),
        Column("n", "n"),
        Column("mean", "mean", number),
        Column("sd", "sd", number),
        Column("difference", "difference", signed),
        Column("ci", level),
        Column("p_holm", "p (Holm)", p_value),
        Column("p_flips", "p (flips)", p_value),
        Column("p_equivalence", "p (equiv.)", p_value),
        Column("verdict", "verdict", left=True),
    ]
    found = [
        row | {"ci": f"{signed(row['low'])} to {signed(row['high'])}" if row.get("low") is not None else None}
        for row in rows(comparison)
    ]
    return Table(f"{comparison.metric} by arm", used(columns, found), found)


def spent(comparison: Comparison) -> Table:
    """What it costs: size, FLOPs, pace, sparsity, and how soon a loss was reached."""
    columns = [
        Column("arm", "arm", left=True),
        Column("parameters", "parameters", "{:,}".format),
        Column("flops_per_token", "FLOPs/token", "{:,}".format),
        Column("tok_per_s", "tokens/s", "{:,.0f}".format),
        Column("active_frac", "active", "{:.1%}".format),
        Column("skippable_frac", "skippable", "{:.1%}".format),
        Column("at", "baseline steps"),
        Column("steps", "to target"),
        Column("seconds", "seconds"),
        Column("flops", "FLOPs"),
    ]
    found = []
    for row in rows(comparison):
        step, hits, of = row["baseline_steps"], row.get("to_loss_reached"), row.get("to_loss_of")
        beyond, some = row["baseline_steps_beyond"], "" if hits == of else f" ({hits} of {of})"
        shown = {"at": None if step is None else f"{'> ' if beyond else ''}{step:,.0f}"}
        if hits is not None:
            to = {key: row[f"to_loss_{key}"] for key in ("steps", "seconds", "flops")}
            known = to["steps"] < float("inf")
            shown["steps"] = (f"{to['steps']:,.0f}" if known else "-") + some
            shown["seconds"] = f"{to['seconds']:,.1f}" if known else None
            shown["flops"] = f"{to['flops']:.3g}" if known else None
        found.append(row | shown)
    return Table("what it costs", used(columns, found), found)


def used(columns: list[Column], found: list[dict[str, Any]]) -> list[Column]:
    """The columns in which something stands."""
    return [column for column in columns if any(row.get(column.key) is not None for row in found)]


def left_out(comparison: Comparison) -> list[str]:
    """The runs that the tables do not hold, a line each kind."""
    lines = [
        f"{len(arm.diverged)} of {len(arm.diverged) + len(arm.runs)} runs of arm '{arm.name}' diverged (seed "
        f"{', '.join(map(str, sorted(arm.diverged)))}): the means are over the others"
        for arm in comparison.arms.values()
        if arm.diverged
    ]
    if comparison.unfinished:
        named = ", ".join(f"{run.path} ({status(run)})" for run in comparison.unfinished)
        lines.append(f"left out, as they are not done: {named}")
    return lines


def wild(comparison: Comparison) -> list[str]:
    """The arms that make the pooled variance useless."""
    return [
        f"arm '{name}' scatters {ratio:.1f} times as much as the others, in a variance that all share: every "
        "interval is too wide, and its own too narrow; compare the others without it"
        for name, ratio in comparison.analysis.wild.items()
    ]


def notes(comparison: Comparison) -> list[str]:
    """How to read the tables."""
    question, analysis = comparison.question, comparison.analysis
    tested = [contrast for contrast in analysis.contrasts.values() if contrast.method != "none"]
    unit = UNITS.get(comparison.metric.rpartition("/")[2], "")
    lines = [f"baseline: {question.baseline}"]
    if any(contrast.method == "paired" for contrast in tested):
        lines.append(
            f"{comparison.metric} = arm + seed + residual by least squares; sd of the residual "
            f"{analysis.residual_sd:.2g} ({counted(analysis.residual_df, 'degree of freedom')}); intervals "
            f"are not adjusted, p is (Holm, {counted(len(tested), 'contrast')}, alpha {question.alpha:g})"
        )
    if unpaired := [name for name, c in analysis.contrasts.items() if c.method == "unpaired"]:
        lines.append(
            f"fewer than {LEAST_SEEDS} seeds in common with the baseline, so unpaired (Welch): "
            f"{', '.join(unpaired)}"
        )
    lines += no_verdicts(comparison)
    if floors := sorted({(c.seeds, c.p_flips_smallest) for c in tested if c.p_flips_smallest is not None}):
        smallest = ", ".join(f"{p:.2g} with {n} seeds" for n, p in floors)
        lines.append(f"sign flips of the paired differences: the smallest possible p is {smallest}")
    elif tested:
        lines.append(f"no sign-flip test below {FLIPS_FROM} common seeds: its p could not come below 0.05")
    if question.margin is not None and tested:
        lines.append(
            f"equivalent: within {question.margin:g}{unit} of the baseline (two one-sided tests at "
            f"{question.alpha:g}, not adjusted); better or worse 'within margin': different, and by less"
        )
    if any(contrast.verdict.startswith("undecided") and contrast.seeds_needed for contrast in tested):
        lines.append(
            f"seeds needed: to find a difference of {question.margin:g} at {question.alpha:g} / "
            f"{len(analysis.contrasts)} (two-sided) with the sd of these runs"
        )
    return lines + cost_notes(comparison)


def no_verdicts(comparison: Comparison) -> list[str]:
    """Why arms have no verdict, a line for each reason, and what would give one."""
    reasons: dict[str, list[str]] = {}
    for name, contrast in comparison.analysis.contrasts.items():
        if contrast.no_verdict:
            reasons.setdefault(contrast.no_verdict, []).append(name)
    lines = [f"no verdict on {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if not comparison.analysis.contrasts:
        lines.append(
            "one arm alone: compare it with the runs of another, `ffnlab compare RUN OTHER ...`, or give the "
            "folder of a study"
        )
    return lines


def cost_notes(comparison: Comparison) -> list[str]:
    """How to read the table of costs."""
    columns = {column.key for column in spent(comparison).columns}
    explained = {
        "skippable_frac": "skippable: share of the FLOPs of training in products with inactive neurons, at "
        "the active fraction of the end: (1 - active) of the products of FFN matrices with a row or a column "
        "per neuron, but for the one that gives the pre-activations, where the activation has exact zeros "
        "(needs a sparse kernel)",
        "at": "baseline steps: where the baseline's mean curve, under its own schedule, is at the arm's mean",
        "steps": f"target: {comparison.target:g}"
        if comparison.target is not None
        else "target: the baseline's last value with the same seed",
        "seconds": "to target: medians over seeds, on straight lines between validations; - (k of n): only k "
        "of n seeds came to it, fewer than a median needs",
    }
    return [text for key, text in explained.items() if key in columns]


def plain(comparison: Comparison) -> dict[str, Any]:
    """All of it, for JSON."""
    question = comparison.question
    return {
        "metric": comparison.metric,
        "baseline": question.baseline,
        "alpha": question.alpha,
        "margin": question.margin,
        "target": comparison.target,
        "residual_sd": comparison.analysis.residual_sd,
        "residual_df": comparison.analysis.residual_df,
        "arms": rows(comparison),
        "runs": [
            {
                "arm": name,
                "seed": str(seed),
                "path": str(run.path),
                "value": comparison.values[name].get(seed),
            }
            for name, arm in comparison.arms.items()
            for seed, run in {**arm.runs, **arm.diverged}.items()
        ],
        "warnings": comparison.warnings + wild(comparison),
        "left_out": left_out(comparison),
        "notes": notes(comparison),
    }


def number(value: float) -> str:
    """Four decimals; one, where a value has thousands."""
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4f}"


def signed(value: float) -> str:
    """A difference, with its sign."""
    return ("+" if value >= 0 else "") + number(value)


def p_value(p: float) -> str:
    """p to two digits."""
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"
