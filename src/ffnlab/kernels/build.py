"""The C++ backend as a shared library: compiled on first use, kept in the cache, loaded once per process.

It is plain C functions on pointers, without PyTorch's headers: compiled in two seconds where an extension
that includes them takes a minute, and independent of PyTorch's version. OpenMP's threads are PyTorch's own,
for both ask for the same libgomp, which is loaded already.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from ffnlab.cache import cache_dir

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
OPTIONAL = "-fopenmp"  # Apple's Clang has none: one thread there
COMPILE_S = 300.0


class NoCompiler(RuntimeError):
    """Why there is no compiled backend, in words for the user."""


def compiler() -> str:
    """$CXX, else the first of c++, g++ and clang++ on the path."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise NoCompiler(
        "no C++ compiler found ($CXX, c++, g++, clang++): install one, such as Debian's package g++"
    )


def target(cxx: str) -> str:
    """What `-march=native` means on this machine: a library of another CPU could die of an illegal
    instruction.
    """
    words = [*FLAGS[:2], "-E", "-v", "-x", "c++", os.devnull, "-o", os.devnull]
    shown = subprocess.run((cxx, *words), capture_output=True, text=True, timeout=60)
    lines = [line for line in shown.stderr.splitlines() if "cc1plus" in line or "-target-cpu" in line]
    return f"{platform.machine()} {' '.join(lines)} {version(cxx)}"


def version(cxx: str) -> str:
    """The compiler's own first line about itself."""
    shown = subprocess.run((cxx, "--version"), capture_output=True, text=True, timeout=60)
    return shown.stdout.partition("\n")[0]


def own(path: Path) -> bool:
    """Whether nobody but this user (or root) can have written the file: it is code that is going to run."""
    facts = path.stat()
    return os.name != "posix" or (facts.st_uid in (os.getuid(), 0) and not facts.st_mode & 0o022)


def compile_to(path: Path, cxx: str) -> None:
    """Compile into a temporary file and rename: a killed or a second process leaves no half library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        for extra in ((OPTIONAL,), ()):
            done = subprocess.run(
                (cxx, *FLAGS, *extra, str(SOURCE), "-o", name),
                capture_output=True,
                text=True,
                timeout=COMPILE_S,
            )
            if done.returncode == 0:
                os.replace(name, path)
                return
        raise NoCompiler(f"{cxx} cannot compile the kernels:\n{done.stderr.strip()[-1000:]}")
    finally:
        Path(name).unlink(missing_ok=True)


def library() -> ctypes.CDLL:
    """The compiled backend. Raises NoCompiler with the reason where there is none."""
    made = attempt()
    if isinstance(made, NoCompiler):
        raise made
    return made


@functools.cache
def attempt() -> ctypes.CDLL | NoCompiler:
    """The library, or why there is none: found out once, or a broken compiler would run for every product."""
    try:
        return made()
    except NoCompiler as error:
        return error


def made() -> ctypes.CDLL:
    """Loaded from the cache, compiled where it is not there."""
    try:
        cxx = compiler()
        made_of = f"{SOURCE.read_text(encoding='utf-8')} {FLAGS} {target(cxx)}"
        path = cache_dir() / "kernels" / f"cpu-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
        try:
            if not own(path):
                raise OSError
            return ctypes.CDLL(str(path))
        except OSError:  # not there yet, damaged, or not to be trusted
            compile_to(path, cxx)
            return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        raise NoCompiler(f"the compiled kernels cannot be made or loaded: {error}") from error
