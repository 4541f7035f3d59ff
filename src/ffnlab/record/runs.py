"""Which folders are run directories, and what is said of a path that is none."""

from pathlib import Path

from ffnlab.errors import closest


def no_run(path: Path) -> str:
    """What is said of a path that is no run directory."""
    expected = "expected a run directory, which train.py makes (out=...)"
    if path.is_file():
        ours = (path.parent / "config.yaml").is_file()
        return f"{path} is a file{f' of the run {path.parent}: give that' if ours else f': {expected}'}"
    if not path.exists():
        around = {run.name: run for folder in (Path("outputs"), path.parent) for run in runs_in(folder)}
        near = closest(path.name, around)
        some = (
            f"did you mean '{around[near]}'?"
            if near
            else f"there are {', '.join(map(str, [*around.values()][:3]))}"
        )
        return f"{path} does not exist{f' ({some})' if around else ''}: {expected}"
    if runs := runs_in(path):
        return f"{path} is a folder of runs ({len(runs)}): name one of them, such as {runs[0]}"
    return f"{path} holds no run (no config.yaml in it or one folder below): {expected}"


def runs_in(folder: Path) -> list[Path]:
    """The run directories of a folder, by name."""
    return sorted(file.parent for file in folder.glob("*/config.yaml"))
