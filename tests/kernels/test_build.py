"""Compiling on first use: what is kept, and what is said where it cannot be done."""

from pathlib import Path

import pytest

from ffnlab.kernels import build


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty cache and nothing loaded."""
    monkeypatch.setenv("FFNLAB_CACHE", str(tmp_path))
    build.attempt.cache_clear()
    yield tmp_path
    build.attempt.cache_clear()


def test_compiled_once_and_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    build.library()
    (kept,) = (fresh / "kernels").iterdir()
    build.attempt.cache_clear()
    monkeypatch.setattr(build, "compile_into", lambda *_: pytest.fail("compiled again"))
    build.library()
    assert kept.suffix == ".so"


def test_no_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.NoCompiler, match="compiler found"):
        build.library()


def test_a_compiler_that_fails_leaves_nothing_behind(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    broken = fresh / "c++"
    broken.write_text("#!/bin/sh\necho 'no such header' >&2\necho . >> \"$0.calls\"\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.NoCompiler, match="no such header"):
        build.library()
    calls = (fresh / "c++.calls").read_text()
    with pytest.raises(build.NoCompiler, match="no such header"):
        build.library()
    assert (fresh / "c++.calls").read_text() == calls  # it is not asked again
    assert not list((fresh / "kernels").iterdir())


def test_a_torn_library_is_made_again(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    build.library()
    (kept,) = (fresh / "kernels").iterdir()
    torn = fresh / "elsewhere/kernels" / kept.name
    torn.parent.mkdir(parents=True)
    torn.write_bytes(kept.read_bytes()[:100])
    monkeypatch.setenv("FFNLAB_CACHE", str(fresh / "elsewhere"))
    build.attempt.cache_clear()
    assert build.library().spmm_f32
    assert torn.stat().st_size == kept.stat().st_size


def test_a_library_with_other_content_is_not_loaded(fresh: Path):
    """As a disk or a power cut leaves it: whole to the loader, and death to who calls it."""
    build.library()
    (kept,) = (fresh / "kernels").iterdir()
    content = bytearray(kept.read_bytes())
    spoilt = fresh / "kernels" / kept.name.replace(".so", "0.so")  # the key of this machine, another hash
    spoilt.write_bytes(content)
    for i in range(len(content) // 2, len(content) // 2 + 100):
        content[i] ^= 255
    kept.unlink()
    kept.write_bytes(content)
    assert build.kept(fresh / "kernels", kept.stem.split("-")[1]) is None
    build.attempt.cache_clear()
    assert build.library().spmm_f32


def test_a_library_that_others_can_write_is_made_again(fresh: Path):
    build.library()
    (kept,) = (fresh / "kernels").iterdir()
    kept.chmod(0o777)
    before = kept.stat().st_ino
    build.attempt.cache_clear()
    assert build.library().spmm_f32
    assert kept.stat().st_ino != before
    assert not kept.stat().st_mode & 0o022
