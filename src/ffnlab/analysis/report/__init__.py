"""The report: one HTML file with everything about some runs, which opens without a network."""

import base64
import warnings
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import jinja2
import yaml

from ffnlab.analysis.figures import Missing, Options, entries
from ffnlab.analysis.health import ailing
from ffnlab.analysis.pictures import render
from ffnlab.analysis.report.explorer import explorer
from ffnlab.analysis.report.layers import layer_table
from ffnlab.analysis.runs import Run, reading

DPI = 90  # of the figures: sharp at the width of a page, and small


def report(runs: Sequence[Run], figures: Sequence[str] | None = None) -> str:
    """The HTML of a report on some runs, with the named figures or all that the runs' records allow.

    All texts of the runs (names, tokens, configurations) are escaped, and a policy in the page forbids it to
    load anything from outside.
    """
    folder = files(__name__)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html")
    script = folder.joinpath("explorer.js").read_text(encoding="utf-8")
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    sections = [section(run, figures, number) for number, run in enumerate(runs)]
    return page.render(runs=sections, script=script, style=style)


def section(run: Run, figures: Sequence[str] | None, number: int) -> dict[str, Any]:
    """What the page says about one run."""
    with reading(run):
        neurons = explorer(run)
    return {
        "id": f"run{number}",
        "name": run.name,
        "status": run.info.get("status", "unknown"),
        "problem": ailing(run),
        "facts": facts(run),
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
        "layers": layer_table(run),
        "figures": drawn(run, figures),
        "explorer": neurons,
    }


def facts(run: Run) -> list[tuple[str, str]]:
    """Name and value of what matters most, in the order of the page."""
    info, final = run.info, run.info.get("final", {})
    choices = info.get("choices", {})
    git = info.get("git") or {}
    found = {
        "model": ", ".join(f"{k}={choices[k]}" for k in ("arch", "model", "ffn", "act") if k in choices),
        "seed": run.config.get("seed"),
        "steps": final.get("step"),
        "tokens": number(final.get("tokens")),
        "val/loss (nats per token)": number(final.get("val/loss"), 4),
        "val/bits_per_byte": number(final.get("val/bits_per_byte"), 4),
        "parameters": number(info.get("parameters")),
        "FLOPs per token, forward": number(info.get("flops_per_token")),
        "seconds": number(info.get("timings", {}).get("total_s"), 1),
        "tokens per second, median": number(info.get("timings", {}).get("median_tok_per_s"), 0),
        "precision": info.get("precision"),
        "device": info.get("device", {}).get("name"),
        "threads": info.get("threads"),
        "commit": git.get("commit", "")[:12] + (" (changed)" if git.get("changed") else ""),
        "versions": ", ".join(f"{name} {v}" for name, v in info.get("versions", {}).items()),
        "created": info.get("created"),
        "command": " ".join(map(str, info.get("command", []))),
    }
    return [(name, str(value)) for name, value in found.items() if value not in (None, "")]


def number(value: Any, digits: int | None = None) -> str | None:
    """With thousands separated; None where there is no number."""
    if not isinstance(value, int | float):
        return None
    return f"{value:,}" if digits is None else f"{value:,.{digits}f}"


def drawn(run: Run, names: Sequence[str] | None) -> list[dict[str, str]]:
    """Title, picture as a data URL, and caption of every figure that the record allows."""
    found = []
    for name, entry in entries().items():
        if names is not None and name not in names:
            continue
        try:
            drawing = entry.draw(run, Options())
        except Missing:
            continue
        except Exception as error:  # one figure less is better than no report
            warnings.warn(f"{run.path}: figure {name}: {type(error).__name__}: {error}", stacklevel=2)
            continue
        url = "data:image/png;base64," + base64.b64encode(render(drawing, name, "png", DPI)).decode()
        found.append({"name": name, "shows": entry.shows, "url": url, "caption": drawing.caption})
    return found
