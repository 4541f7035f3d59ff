"""Reads outputs/sparsity_payoff, writes results/: the arms against `c_dense`, all runs, layers at the end."""

from pathlib import Path

from ffnlab.analysis.study import conclude, script

if __name__ == "__main__":
    script(lambda: conclude(Path(__file__).parent, baseline="c_dense"))
