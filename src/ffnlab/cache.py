"""Where everything that can be made again is kept: tokenised data, measured rates, compiled kernels."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """$FFNLAB_CACHE, else $XDG_CACHE_HOME/ffnlab, else ~/.cache/ffnlab."""
    if own := os.environ.get("FFNLAB_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ffnlab"
