"""Probes: what the neurons of a model do while it trains, read without touching the training."""

from ffnlab.probe.base import Observation, Probe
from ffnlab.probe.core import Observer, ProbeSettings

__all__ = ["Observation", "Observer", "Probe", "ProbeSettings"]
