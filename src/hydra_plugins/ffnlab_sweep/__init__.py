"""Sweeps: the sweeper `arms` makes lists of overrides, the launcher `process` runs a process for each."""
