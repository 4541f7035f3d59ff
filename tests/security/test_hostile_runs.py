"""A run directory from a stranger, spoilt in every way, given to every verb that reads runs: nothing runs."""

import hashlib
import importlib.util
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs.pickles
import pytest
import yaml

from ffnlab import cli
from ffnlab.errors import UserError, report
from ffnlab.record.rundir import load_config
from ffnlab.run import run

ABOUT = {  # verb -> its further words; every verb that takes a run, and train.py on the same out=
    "ablate": ["--windows", "2", "--scan", "64"],
    "compare": [],
    "dashboard": ["--json", "OUT", "--project", "p"],
    "doctor": [],
    "export": ["--to", "hf", "--out", "OUT"],
    "figures": ["active_frac", "--out", "OUT"],
    "prune": ["--windows", "2", "--out", "OUT"],
    "report": ["--figures", "--out", "OUT"],
    "sample": ["--tokens", "2"],
    "sparsify": ["--windows", "2"],
    "sync": ["--mode", "offline"],
    "verify": [],
    "train": [],
}
BUILDS = ("ablate", "doctor", "prune", "sample", "sparsify")
WEIGHTS = (*BUILDS, "export")
SCREEN = 24  # lines


def config(run_: Path, change: Callable[[str], str]) -> None:
    file = run_ / "config.yaml"
    file.write_text(change(file.read_text()))


def part(run_: Path, group: str, node: Any) -> None:
    """Another value of one key of config.yaml."""
    cfg = yaml.safe_load((run_ / "config.yaml").read_text())
    (run_ / "config.yaml").write_text(yaml.safe_dump(cfg | {group: node}))


def info(run_: Path, **fields: Any) -> None:
    file = run_ / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def resealed(run_: Path, name: str, content: bytes, **more: Any) -> None:
    """A file of the checkpoint with other content, and a manifest that vouches for it."""
    (step,) = (run_ / "checkpoints").glob("step-*")
    (step / name).write_bytes(content)
    manifest = json.loads((step / "manifest.json").read_text())
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"][name] = entry
    (step / "manifest.json").write_text(json.dumps(manifest | more))


def zarr_2(run_: Path, evil: bytes) -> None:
    """A store of zarr 2, which takes any codec of numcodecs, that which unpickles among them."""
    store = run_ / "neurons.zarr"
    shutil.rmtree(store)
    array = store / "L00" / "activity" / "active_frac"
    array.mkdir(parents=True)
    for group in (store, store / "L00", store / "L00" / "activity"):
        (group / ".zgroup").write_text('{"zarr_format": 2}')
    about = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "order": "C", "fill_value": ""}
    about |= {"compressor": {"id": "pickle", "protocol": 4}, "filters": [{"id": "vlen-utf8"}]}
    (array / ".zarray").write_text(json.dumps(about))
    (array / "0").write_bytes(evil)


def metadata(run_: Path, **changes: Any) -> None:
    file = run_ / "neurons.zarr" / "L00" / "activity" / "active_frac" / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def link(place: Path, target: Path) -> None:
    """`place` moved out of the run to `target`, with a link left behind."""
    shutil.move(place, target)
    place.symlink_to(target)


def clear(place: Path) -> None:
    """Remove a folder or a file, where there is one."""
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def pipe(place: Path) -> None:
    place.unlink()
    os.mkfifo(place)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
DEEP = "[" * 100_000
ALL = tuple(ABOUT)
SOME = ("report", "sample", "sync", "verify", "train")  # all read config.yaml by one function
STORE = ("report", "verify", "train")
ACT = {"_target_": "os.mkdir"}
# what is spoilt -> (how, who must refuse it; the others may ignore it)
SPOILT: dict[str, tuple[Callable[[Path, bytes, Path], object], tuple[str, ...]]] = {
    "config: python tag": (
        lambda r, e, m: config(r, lambda t: t + f"x: !!python/object/apply:os.mkdir [{m}]\n"),
        ALL,
    ),
    "config: harmless tag": (lambda r, e, m: config(r, lambda t: t + "x: !!set {a}\n"), SOME),
    "config: aliases": (lambda r, e, m: config(r, lambda t: t + BOMB), ALL),
    "config: deep": (lambda r, e, m: config(r, lambda t: t + f"x: {DEEP}\n"), SOME),
    "config: environment": (lambda r, e, m: part(r, "arm", "${oc.env:HOME}"), ALL),
    "config: resolver in a list": (lambda r, e, m: part(r, "plugins", ["${oc.create:x}"]), SOME),
    "config: target": (lambda r, e, m: part(r, "act", {**ACT, "path": str(m)}), ALL),
    "config: target below": (lambda r, e, m: part(r, "new", [{"x": {**ACT, "path": str(m)}}]), SOME),
    "config: alias target": (
        lambda r, e, m: part(r, "act", {"_target_": "ffnlab.analysis.runs.pd.read_pickle"}),
        (*BUILDS, "train"),
    ),
    "config: dunder": (lambda r, e, m: part(r, "act", {"_target_": "ffnlab.nn.gpt.__builtins__.eval"}), SOME),
    "config: plugin": (lambda r, e, m: hire(r), (*BUILDS, "train")),
    "config: shapes": (lambda r, e, m: part(r, "model", ["x"]), SOME),
    "config: pipe": (lambda r, e, m: pipe(r / "config.yaml"), SOME),
    "config: link": (lambda r, e, m: link(r / "config.yaml", r.parent / "elsewhere.yaml"), SOME),
    "run.json: deep": (lambda r, e, m: (r / "run.json").write_text(DEEP), SOME),
    "run.json: shapes": (lambda r, e, m: info(r, final=[1], choices="x", data=3), SOME),
    "run.json: id": (lambda r, e, m: info(r, id="../../mark"), SOME),
    "run.json: link": (lambda r, e, m: link(r / "run.json", r.parent / "elsewhere.json"), SOME),
    "metrics: texts": (
        lambda r, e, m: (r / "metrics.jsonl").write_text('{"step": 1, "val/loss": "<script>"}\n'),
        ("compare", "report", "sync", "verify", "figures"),
    ),
    "metrics: deep": (
        lambda r, e, m: (r / "metrics.jsonl").write_text(DEEP + "\n"),
        ("compare", "report", "verify"),
    ),
    "trainer.pt: pickle": (lambda r, e, m: resealed(r, "trainer.pt", e), (*WEIGHTS, "train")),
    "weights: pickle": (lambda r, e, m: resealed(r, "model.safetensors", e), (*WEIGHTS, "train")),
    "manifest: name": (lambda r, e, m: resealed(r, "../../../evil", e), ("export", "sample", "verify")),
    "checkpoints: link": (
        lambda r, e, m: link(r / "checkpoints", r.parent / "elsewhere"),
        ("export", "sample", "verify"),
    ),
    "neurons: zarr 2": (lambda r, e, m: zarr_2(r, e), STORE),
    "neurons: codec": (lambda r, e, m: metadata(r, codecs=[{"name": "numcodecs.pickle"}]), STORE),
    "neurons: type": (lambda r, e, m: metadata(r, data_type="variable_length_bytes"), STORE),
    "neurons: transformers": (lambda r, e, m: metadata(r, storage_transformers=[{"name": "x"}]), STORE),
    "neurons: link": (
        lambda r, e, m: link(r / "neurons.zarr" / "L00", r.parent / "elsewhere"),
        STORE,
    ),
    "tokenizer: pickle": (lambda r, e, m: (r / "tokenizer.json").write_bytes(e), ("sample", "export")),
    "tokenizer: pattern": (
        lambda r, e, m: (r / "tokenizer.json").write_text(
            '{"kind": "bpe", "pattern": "(a+)+$", "ranks": []}'
        ),
        ("sample", "export"),
    ),
}
HELPER = "import os\nos.mkdir(os.environ['FFNLAB_TEST_MARK'])\nclass Act: pass\n"


def hire(run_: Path) -> None:
    """The run names a package of its own, which lies where it would be imported from."""
    (run_.parent / "evil_package.py").write_text(HELPER)
    part(run_, "plugins", ["evil_package"])
    part(run_, "act", {"_target_": "evil_package.Act"})


def call(verb: str, path: Path, cfg: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and all that is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if verb == "train":
            try:
                run(cfg | {"out": str(path)}, {"ffn": "mlp", "act": "relu"})
                code, said = 0, ""
            except UserError as error:
                code, said = 1, report(error.problems, "train.py")
        else:
            words = [str(path.parent / "out") if word == "OUT" else word for word in ABOUT[verb]]
            code, said = cli.main([verb, str(path), *words]), ""
    shown = capsys.readouterr()
    return code, shown.out + shown.err + said


def test_every_verb_that_takes_a_run_is_here():
    """Its argument says RUN in its source; importing all verbs would take seconds."""
    for name, verb in cli.verbs().items():
        spec = importlib.util.find_spec(verb.module)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        words = re.findall(r'add_argument\(\s*"(?:runs?|what)",[^)]*metavar="[^"]*RUN', source)
        assert not words or name in ABOUT, name
    assert len(ABOUT) == 13


@pytest.mark.parametrize("name", SPOILT)
def test_nothing_runs_and_one_screen_says_what_is_wrong(
    name: str,
    copied: Callable[[], Path],
    evil: bytes,
    mark: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(
        numcodecs.pickles, "ALLOW_UNSAFE_PICKLE_DECODE", True
    )  # the library's own guard is off
    monkeypatch.setenv("FFNLAB_TEST_MARK", str(mark))
    monkeypatch.syspath_prepend(str(mark.parent))
    spoil, refusers = SPOILT[name]
    for verb in {**dict.fromkeys(refusers), "compare": None, "export": None}:
        path = copied()
        cfg = load_config(path)
        if verb == "train":
            info(path, status="interrupted")
        for left in path.parent.glob("elsewhere*"):
            clear(left)
        spoil(path, evil, mark)
        clear(path.parent / "out")
        code, said = call(verb, path, cfg, capsys)
        assert not mark.exists(), verb
        assert not re.search("Traceback|internal error", said), (verb, said)
        if verb in refusers:
            assert code == 1, (verb, said)
            assert 0 < len(said.splitlines()) <= SCREEN, (verb, said)
            assert max(map(len, said.splitlines())) < 1000, (verb, said)


def test_the_whole_run_is_read_by_all(copied: Callable[[], Path], capsys: pytest.CaptureFixture[str]):
    """So that a refusal above is one of what was spoilt."""
    for verb in [*ABOUT][:-1]:
        if verb != "sync":  # which starts W&B
            path = copied()
            clear(path.parent / "out")
            code, said = call(verb, path, {}, capsys)
            assert code == 0, (verb, said)


def test_newer_keys_are_read(copied: Callable[[], Path], capsys: pytest.CaptureFixture[str]):
    path = copied()
    part(path, "newer", {"key": [1, {"deep": None}]})
    info(path, newer=[{"a": 1}], final={"step": 2, "new/metric": 1.0})
    for verb in ("report", "sample", "compare", "verify"):
        code, said = call(verb, path, {}, capsys)
        assert code == 0, (verb, said)


def test_the_payload_works(evil: bytes, mark: Path):
    """So that its silence above means something."""
    pickle.loads(evil)  # noqa: S301
    assert mark.exists()
