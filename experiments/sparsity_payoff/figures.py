"""Reads outputs/sparsity_payoff, writes results/: the arms against `c_dense`, all runs, layers at the end."""

from ffnlab.analysis.conclude import conclude
from ffnlab.analysis.study import script

if __name__ == "__main__":
    script(__file__, __doc__, lambda study: conclude(study, baseline="c_dense"))
