"""Names of classes: only those defined in ffnlab or in a package of the command line are found."""

import sys
from pathlib import Path

import pytest

from ffnlab.config import factory, locate
from ffnlab.errors import UserError
from ffnlab.nn.gpt import GPT


@pytest.mark.parametrize(
    "target",
    [
        "ffnlab.analysis.runs.pd.read_pickle",
        "ffnlab.analysis.runs.np.load",
        "ffnlab.analysis.runs.xr.Dataset",
        "ffnlab.analysis.runs.Path",  # a class, but of another package
        "ffnlab.nn.gpt.nn.Linear",
        "ffnlab.nn.gpt.nn",
        "ffnlab.nn.gpt.GPT.__init__.__globals__",
        "ffnlab.nn.gpt.__builtins__",
        "ffnlab.nn.gpt.__loader__",
        "ffnlab.kernels.build.subprocess.Popen",
        "ffnlab.cli.main",  # a function
        "ffnlab..os.system",
        "ffnlab_evil.X",
        "os.system",
        "subprocess.Popen",
        "builtins.eval",
        "torch.load",
        "GPT",
        "",
    ],
)
def test_others_are_refused(target: str):
    with pytest.raises(UserError, match="_target_"):
        locate(target)
    with pytest.raises(UserError, match="_target_"):
        factory({"_target_": target}, "act")


def test_our_own_is_found():
    assert locate("ffnlab.nn.gpt.GPT") is GPT


def test_a_package_is_imported_only_when_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "hired_part.py").write_text("import os\nfrom os import path\nclass Part: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="expected a class of ffnlab"):
        locate("hired_part.Part")
    assert "hired_part" not in sys.modules
    assert locate("hired_part.Part", ("ffnlab", "hired_part")).__name__ == "Part"
    with pytest.raises(UserError, match="No module"):
        locate("hired_part.os.system", ("ffnlab", "hired_part"))
