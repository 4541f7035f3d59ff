"""The few figures that a run draws when it is done, in a process of their own.

A process can be ended when its time is over. A thread cannot, and one that still draws when Python exits ends
the training with an abort: it is in C++ code then, which must not be unwound.
"""

import subprocess
import sys
import warnings
from pathlib import Path

STANDARD = ("loss", "active_frac", "threshold", "sparsity_by_layer", "heatmap")
PATIENCE_S = 4.5  # a run waits 5 s for its figures


def at_end(path: Path) -> list[Path]:
    """Draws what the record of a run directory allows of STANDARD, as PNG; those that were done in time."""
    command = [sys.executable, "-P", "-m", __name__, str(path)]  # -P: no module of the folder it is called in
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S)
        out, problems = done.stdout, done.stderr.decode(errors="replace").splitlines()
    except subprocess.TimeoutExpired as late:
        out, problems = late.stdout or b"", [f"no time for all figures; `ffnlab figures {path}` draws them"]
    for problem in problems:
        warnings.warn(problem.removeprefix("warning: "), stacklevel=2)
    return [path / "figures" / f"{name}.png" for name in out.decode().split()]


def main(path: Path) -> None:
    """What the process does: it says the name of each figure as soon as its file is there."""
    from ffnlab.analysis.figures import Options
    from ffnlab.analysis.pictures import draw
    from ffnlab.analysis.runs import Run
    from ffnlab.errors import plain_warnings

    plain_warnings()
    run = Run(path)
    for name in STANDARD:
        try:
            for picture in draw(run, [name], Options(), path / "figures")[0]:
                print(picture.stem, flush=True)
        except Exception as error:
            warnings.warn(f"figure {name}: {type(error).__name__}: {error}", stacklevel=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
