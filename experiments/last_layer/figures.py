"""Reads outputs/last_layer, writes results/: the arms against `skips`, every run, the layers at the end."""

from pathlib import Path

from ffnlab.analysis.study import conclude, script

if __name__ == "__main__":
    script(lambda: conclude(Path(__file__).parent, baseline="skips"))
