"""Reads results/kernel.csv, which `ffnlab bench sparse --csv` wrote, and draws results/kernel.png."""

import csv
from pathlib import Path

from ffnlab.analysis.crossover import crossover
from ffnlab.analysis.style import as_file

RESULTS = Path(__file__).with_name("results")

if __name__ == "__main__":
    with (RESULTS / "kernel.csv").open(encoding="utf-8") as file:
        picture = crossover(csv.DictReader(file))
    (RESULTS / "kernel.png").write_bytes(as_file(picture, "png", dpi=120))
    print(RESULTS / "kernel.png")
