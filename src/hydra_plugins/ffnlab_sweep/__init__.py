"""Sweeps: the sweeper `arms` makes lists of overrides, the launcher `process` runs each in a process of its own."""
