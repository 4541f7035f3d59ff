"""Reads outputs/threshold, writes results/: the arms against `none`, every run, the layers at the end."""

from ffnlab.analysis.conclude import conclude
from ffnlab.analysis.study import script

if __name__ == "__main__":
    script(__file__, __doc__, lambda study: conclude(study, baseline="none"))
