"""The rules of the house, read off the source: imports, defaults, safe loading, lengths."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    [
        *ROOT.glob("src/**/*.py"),
        ROOT / "train.py",
        *ROOT.glob("experiments/**/*.py"),
        *ROOT.glob("notebooks/*.py"),
    ]
)

ZERO = {"nn", "data", "optim", "schedule", "probe", "record", "kernels", "formats"}
BASE = {"errors", "cache", "foreign", "withheld"}  # what every part may import
ONE = {"clock", "device", "diagnose", "evaluate", "processes", "spikes", "stop", "train", "update"}
CONFIG = {
    "config",
    "validate",
    "explain",
}  # compose, check, say what is wrong: what build needs before it builds
BELOW_RUN = ZERO | ONE | CONFIG | {"build", "layers"}
TWO = {"build", "run", "verbs"}
# part -> the parts that it may import besides itself and ffnlab.errors
MAY_IMPORT = {
    **{part: set() for part in BASE},
    **{part: set() for part in ZERO | ONE},
    "train": {"clock", "spikes", "update"},
    "nn": {"kernels"},
    "config": set(),
    "explain": {"config"},
    "ranges": ZERO,
    "validate": ZERO | ONE | {"config", "build", "layers", "ranges"},
    "layers": ZERO | {"config"},  # the part of build that knows FFNs
    "build": ZERO | ONE | CONFIG | {"layers"},
    "session": BELOW_RUN,  # run in five files: the parts, the facts, the end, the course, the directory
    "facts": BELOW_RUN | {"session"},
    "ending": BELOW_RUN | {"session"},
    "recorded": BELOW_RUN | {"session", "facts", "ending", "trouble"},
    "trouble": BELOW_RUN | {"session", "ending"},
    "run": BELOW_RUN | {"session", "ending", "recorded"},
    "intervene": {"probe"},
    "trained": BELOW_RUN,  # a run's model and data, opened again
    "verbs": BELOW_RUN | {"intervene", "trained"},
    "analysis": {"record"},
    "cli": TWO | CONFIG | {"analysis"},
    "train.py": TWO | CONFIG | {"train", "analysis"},  # of train: Diverged, which is an exit code
    "hydra_plugins": TWO | CONFIG | {"analysis", "record"},
    "experiments": {"analysis"},
    "notebooks": {"analysis"},
}
# Libraries that only these parts or modules may import, so that the rest can live without them.
ONLY = {
    "wandb": {"record.wandb", "record.dashboard"},
    "wandb_workspaces": {"record.dashboard"},
    "triton": {"kernels"},
    "hydra": CONFIG | {"cli", "train.py", "hydra_plugins"},
    "omegaconf": CONFIG | {"build", "cli", "train.py", "hydra_plugins"},
}
# Loading a file must never run code from it.
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.hub.load",
    "instantiate",
}
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
FORBIDDEN_NAMES = {"instantiate", "get_class", "get_method", "get_object"}  # hydra.utils
DRAWERS = {"utils", "util", "helpers", "common", "manager", "misc"}


def module(path: Path) -> str:
    """Dotted name without `ffnlab.`: nn.ffn.mlp, train.py, hydra_plugins.ffnlab_sweep.sweeper."""
    if path == ROOT / "train.py":
        return "train.py"
    relative = path.relative_to(ROOT / "src" if ROOT / "src" in path.parents else ROOT).with_suffix("")
    parts = relative.parts[1:] if relative.parts[0] == "ffnlab" else relative.parts
    return ".".join(part for part in parts if part != "__init__") or "ffnlab"


def part(name: str) -> str:
    """The row of the table that a module belongs to."""
    return name if name == "train.py" else name.split(".")[0]


def imports(tree: ast.AST) -> Iterator[str]:
    """Every imported module, with the imported name: `from a.b import c` is a.b.c."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES if path.exists()}


def test_every_part_has_a_floor(trees: dict[Path, ast.Module]) -> None:
    assert {part(module(path)) for path in trees} - {"ffnlab"} <= set(MAY_IMPORT)


def test_imports_keep_the_floors(trees: dict[Path, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        own = part(module(path))
        for name in imports(tree):
            if name == "hydra_plugins" or name.startswith("hydra_plugins."):
                other = "hydra_plugins"
            elif name.startswith("ffnlab."):
                other = name.split(".")[1]
            else:
                continue
            if other not in {own} | BASE | MAY_IMPORT.get(own, set()):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_libraries_stay_where_they_belong(trees: dict[Path, ast.Module]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, tree in trees.items()
        for name in imports(tree)
        if (allowed := ONLY.get(name.split(".")[0])) is not None
        and not {module(path), part(module(path))} & allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_that_is_loaded_can_run_code(trees: dict[Path, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        for name in imports(tree):
            if name.split(".")[0] in FORBIDDEN_IMPORTS or (
                name.startswith("hydra") and name.rsplit(".", 1)[-1] in FORBIDDEN_NAMES
            ):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            function = ast.unparse(call.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if (
                function in FORBIDDEN_CALLS
                or function.endswith(".instantiate")
                or (function == "torch.load" and options.get("weights_only") != "True")
                or options.get("weights_only", "True") != "True"
                or options.get("allow_pickle", "False") != "False"
                or options.get("shell", "False") != "False"
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{call.lineno} calls {function}")
    assert not wrong, "\n".join(wrong)


def too_long(name: str, lines: int, limit: int) -> list[str]:
    return [f"{name} has {lines} lines, at most {limit}"] if lines > limit else []


def test_modules_and_functions_stay_short(trees: dict[Path, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        name, shown = module(path), path.relative_to(ROOT)
        wrong += too_long(str(shown), len(path.read_text(encoding="utf-8").splitlines()), 250)
        if name.rsplit(".", 1)[-1] in DRAWERS:
            wrong.append(f"{shown}: name a module after what it does")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                wrong += too_long(f"{shown}:{node.lineno} {node.name}", lines, 60)
    assert not wrong, "\n".join(wrong)


def targets() -> list[str]:
    """Every class of ffnlab that a yaml names."""

    def walk(node: object) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(node.get("_target_"), str):
                yield node["_target_"]
            for value in node.values():
                yield from walk(value)

    found = {
        name
        for path in ROOT.glob("configs/**/*.yaml")
        for name in walk(yaml.safe_load(path.read_text(encoding="utf-8")))
    }
    return sorted(name for name in found if name.startswith("ffnlab."))


@pytest.mark.parametrize("target", targets())
def test_a_part_has_no_defaults_of_its_own(target: str) -> None:
    """The yaml is the only place that holds values, so what a run used can be read in its configuration."""
    module_name, _, name = target.rpartition(".")
    cls = getattr(importlib.import_module(module_name), name)
    parameters = inspect.signature(cls).parameters.values()
    assert [p.name for p in parameters if p.default is not p.empty] == []
    assert [p.name for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)] == []
