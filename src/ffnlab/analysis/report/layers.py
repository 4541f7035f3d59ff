"""The table of a report: what every layer was like at the end."""

import re
from typing import Any

from ffnlab.analysis.runs import Run

# heading -> metric of a layer; a column shows where a run has it
COLUMNS = {
    "active": "probe/activity/{}/active_frac",
    "dead": "probe/activity/{}/dead_frac",
    "always on": "probe/activity/{}/always_on_frac",
    "C": "probe/threshold/{}/c",
    "mean pre-activation": "probe/preact/{}/mean",
    "sd": "probe/preact/{}/sd",
    "entropy of the expert load": "moe/{}/load_entropy",
    "width": "ffn/{}/width_frac",
}
PERCENT = {"active", "dead", "always on", "width"}
LAYER = re.compile(r"(?:probe/\w+|moe|ffn)/(L\d{2,}\w*)/\w+")


def layer_table(run: Run) -> dict[str, Any]:
    """{"columns": [...], "rows": [[layer, ...], ...]}, numbers as text; the last value of every metric."""
    last: dict[str, float] = {}
    for row in run.rows:
        last.update({key: value for key, value in row.items() if LAYER.fullmatch(key)})
    labels = sorted({match[1] for key in last if (match := LAYER.fullmatch(key))})
    shown = [name for name, key in COLUMNS.items() if any(key.format(label) in last for label in labels)]
    rows = [
        [label, *(cell(last.get(COLUMNS[name].format(label)), name) for name in shown)] for label in labels
    ]
    return {"columns": ["layer", *shown], "rows": rows}


def cell(value: float | None, column: str) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if column in PERCENT else f"{value:.3f}"
