"""What analysis writes is whole or not there, also on a disk that refuses; and one line says so."""

import errno
import os
from pathlib import Path

import pytest

from ffnlab import cli
from ffnlab.analysis.runs import Run
from ffnlab.analysis.study import Study
from ffnlab.errors import UserError

OLD = b"of before"


def commands(run: Path, out: Path) -> dict[str, list[str]]:
    """The file that each command writes -> its arguments."""
    return {
        "loss.png": ["figures", str(run), "loss", "--out", str(out)],
        "report.html": ["report", str(run), "--figures", "loss", "--out", str(out / "report.html")],
        "dots.svg": ["compare", str(run), "--figure", str(out / "dots.svg")],
    }


def failing(number: int):
    """A call that the system refuses."""

    def call(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture
def run(make_run, tmp_path: Path) -> Path:
    path = make_run(tmp_path / "run", layers=["L00"], neurons=4, tokens=4, steps=2)
    (path / "config.yaml").write_text(
        "{seed: 0, train: {steps: 2, batch_size: 1, grad_accum: 1}, model: {seq_len: 8}}"
    )
    return path


@pytest.mark.parametrize("name", ["loss.png", "report.html", "dots.svg"])
@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "cannot be written")]
)
def test_a_disk_that_refuses(
    name: str, number: int, said: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(OLD)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing(number))
        if number == errno.EROFS:  # which refuses to take away, too
            patched.setattr(Path, "unlink", failing(number))
        assert cli.main(commands(run, out)[name]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if said in line and str(out / name) in line]
    assert not [line for line in lines if "internal error" in line]
    assert (out / name).read_bytes() == OLD
    if number == errno.ENOSPC:
        assert [path.name for path in out.iterdir()] == [name]
    assert cli.main(commands(run, out)[name]) == 0
    assert (out / name).read_bytes() != OLD


def test_a_folder_that_cannot_be_made(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_bytes(OLD)
    out = tmp_path / "file" / "out"
    for name in ("loss.png", "dots.svg"):
        assert cli.main(commands(run, out)[name]) == 1
        assert f"{out}: cannot be written (Not a directory)" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be written"):
        Study([Run(run)], out).save("a.csv", "text")
