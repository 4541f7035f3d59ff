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
import warnings
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


def compile_into(folder: Path, key: str, cxx: str) -> Path:
    """Compile into a temporary file and rename: a killed or a second process leaves no half library. The
    name ends in the hash of the content: what a disk or a power cut spoils is not loaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, suffix=".so")
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
                if not extra:
                    warnings.warn(f"{cxx} has no OpenMP: the sparse kernels use one thread", stacklevel=2)
                path = folder / f"cpu-{key}-{digest(Path(name).read_bytes())}.so"
                os.replace(name, path)
                return path
        raise NoCompiler(f"{cxx} cannot compile the kernels:\n{done.stderr.strip()[-1000:]}")
    finally:
        Path(name).unlink(missing_ok=True)


def kept(folder: Path, key: str) -> Path | None:
    """The library that was compiled before, where it is whole and nobody but this user (or root) can have
    written it: it is code that is going to run.
    """
    for path in folder.glob(f"cpu-{key}-*.so"):
        facts = path.stat()
        own = os.name != "posix" or (facts.st_uid in (os.getuid(), 0) and not facts.st_mode & 0o022)
        if own and path.is_file() and path.stem.endswith(digest(path.read_bytes())):
            return path
    return None


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def library() -> ctypes.CDLL:
    """The compiled backend. Raises NoCompiler with the reason where there is none."""
    found = attempt()
    if isinstance(found, NoCompiler):
        raise found
    return found


@functools.cache
def attempt() -> ctypes.CDLL | NoCompiler:
    """The library, or why there is none: found out once, or a broken compiler would run for every product."""
    try:
        return load()
    except NoCompiler as error:
        return error


def load() -> ctypes.CDLL:
    """Loaded from the cache, compiled where it is not there."""
    try:
        cxx, folder = compiler(), cache_dir() / "kernels"
        key = digest(f"{SOURCE.read_text(encoding='utf-8')} {FLAGS} {target(cxx)}".encode())
        return ctypes.CDLL(str(kept(folder, key) or compile_into(folder, key, cxx)))
    except (OSError, subprocess.SubprocessError) as error:
        raise NoCompiler(f"the compiled kernels cannot be made or loaded: {error}") from error
