"""The figure of bench sparse: a line for each case, through its rows in the order of their densities."""

import numpy as np
import pytest
from matplotlib.lines import Line2D

from ffnlab.analysis.crossover import crossover
from ffnlab.analysis.style import as_file


def row(section: str, density: float, speedup: float, **other: str) -> dict[str, str]:
    same = {"section": section, "shape": "16x64", "precision": "fp32", "bound": str(1 / density)}
    return {**same, "density": str(density), "speedup": str(speedup), **other}


def points(line: Line2D) -> list[list[float]]:
    return np.asarray(line.get_xydata()).tolist()


def test_lines_through_the_rows():
    rows = [row("ffn", 0.4, 0.5), row("ffn", 0.1, 2.0), row("products", 0.1, 9.0), row("token", 0.1, 1.5)]
    rows.append(row("ffn", 0.1, 3.0, precision="bf16"))
    picture = crossover(rows)
    whole, token = picture.axes
    lines = {line.get_label(): points(line) for line in whole.lines}
    assert lines["16x64 fp32"] == [[0.1, 2.0], [0.4, 0.5]]
    assert lines["16x64 bf16"] == [[0.1, 3.0]]
    bounds = [points(line) for line in token.lines if line.get_linestyle() == "--"]
    assert bounds[0] == [[0.1, pytest.approx(10)]]
    assert as_file(picture, "png").startswith(b"\x89PNG")
