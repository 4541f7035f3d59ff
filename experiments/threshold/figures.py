"""Reads outputs/threshold, writes results/: the arms against `none`, every run, the layers at the end."""

from pathlib import Path

from ffnlab.analysis.study import conclude, script

if __name__ == "__main__":
    script(lambda: conclude(Path(__file__).parent, baseline="none"))
