"""No source of ours has a way in which data that is read could become code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("src/**/*.py"), ROOT / "train.py", *ROOT.glob("experiments/**/*.py")])

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "zipfile", "tarfile"}
MODULES |= {"runpy", "code", "codeop"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
FUNCTIONS = {
    "os.system",
    "os.popen",
    "os.execv",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.hub.load",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "pd.read_pickle",
    "pandas.read_pickle",
    "shutil.unpack_archive",
    "zarr.open",
    "zarr.open_array",
    "zarr.load",
    "subprocess.getoutput",
}
LOADERS = ("UnsafeLoader", "FullLoader")
MUST = {  # function -> the option without which it could run code
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
    "zarr.open_group": ("zarr_format", 3),  # zarr 2 takes codecs that unpickle
    "xr.open_zarr": ("zarr_format", 3),
}
# Where one function alone may do what others must not: file -> what, and why.
EXCEPTIONS = {
    ("src/ffnlab/config.py", "importlib.import_module"): "locate: the package was checked before",
    ("src/ffnlab/analysis/figures/__init__.py", "importlib.import_module"): "the modules beside it",
    ("src/ffnlab/cli.py", "importlib.import_module"): "a verb: its name is that of a file of ours",
    ("src/ffnlab/record/store.py", "zarr.open_group"): "the one place that opens a store, when it is checked",
}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def wrong(source: str, name: str) -> list[str]:
    """What in a source could run what it reads."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            found += [f"imports {m}" for m in modules if m.split(".")[0] in MODULES]
            if isinstance(node, ast.ImportFrom):  # `from yaml import load` would hide the module below
                named = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [f"imports {n}" for n in named if n in FUNCTIONS or n in MUST]
        elif isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node).split(".")[-1] in LOADERS:
            found.append(f"names {ast.unparse(node)}")
    for function, call in calls(tree):
        options = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
        if function in BUILTINS or function in FUNCTIONS or function.endswith(".extractall"):
            found.append(f"calls {function}")
        if function in MUST and options.get(MUST[function][0]) != MUST[function][1]:
            found.append(f"calls {function} without {MUST[function][0]}={MUST[function][1]}")
        if any(k.arg in ("shell", "trust_remote_code", "allow_pickle") for k in call.keywords):
            bad = [k for k in ("shell", "trust_remote_code", "allow_pickle") if options.get(k) is True]
            found += [f"calls {function} with {k}=True" for k in bad]
        if function in ("importlib.import_module", "zarr.open_group") and (name, function) not in EXCEPTIONS:
            found.append(f"calls {function}")
    return found


def test_no_source_runs_what_it_reads():
    assert len(SOURCES) > 150
    names = {path: path.relative_to(ROOT).as_posix() for path in SOURCES}
    found = {name: wrong(path.read_text(encoding="utf-8"), name) for path, name in names.items()}
    assert {name: problems for name, problems in found.items() if problems} == {}


def test_every_exception_is_still_one():
    for path, function in EXCEPTIONS:
        source = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert function in {name for name, _ in calls(source)}, (path, function)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "eval('1')",
        "exec(text)",
        "os.system('ls')",
        "yaml.load(text)",
        "from yaml import load",
        "yaml.load_all(text, Loader=yaml.UnsafeLoader)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
        "archive.extractall(folder)",
        "zarr.open_group(path)",
        "importlib.import_module(name)",
        "load_dataset(name, trust_remote_code=True)",
    ],
)
def test_each_of_these_would_be_found(source: str):
    assert wrong(source, "src/ffnlab/x.py")
