"""The verbs of the command `ffnlab` that read run directories; see `ffnlab.verbs`."""
