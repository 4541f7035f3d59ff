"""A sweep under fire: processes are killed, the disk fills, and every result must be that of a quiet sweep.

    python tests/soak.py --minutes 30

A quiet sweep runs once. Then the same sweep runs again and again until the minutes are over, and each time,
at random moments, a job or the sweep itself gets SIGKILL, SIGTERM or SIGINT, or the disk below its outputs is
full for some seconds (a small tmpfs; where none may be mounted, disks do not fill, and that is said). The
sweep is started again until it is done. Then every run is compared with its quiet counterpart to the bit, and
`ffnlab verify` must find it whole. Exit code 0: nothing was lost; 1: something was, and stays in --folder.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from ffnlab.record.same import unequal  # noqa: E402
from ffnlab.verbs.verify import findings  # noqa: E402

ARMS = {
    "plain": ["ffn=mlp", "probe=[default,crossings,trace]"],
    "sparse": ["ffn=mlp", "ffn.kernel=sparse", "optim=adamw", "train.grad_accum=2"],
    "gated": ["ffn=swiglu", "skip=unet", "optim=sgd", "train.checkpoint_activations=true"],
    "experts": ["ffn=moe", "train.on_spike=rewind", "train.spike_window=32"],
}
SWEEP = [
    "study=soak", "model.n_layers=4", "model.d_model=16", "model.n_heads=2", "model.seq_len=32",
    "model.dropout=0.1", "data=counting", "data.n_documents=60", "data.test_frac=0.1", "tokenizer=byte",
    "threshold=learned", "train.batch_size=4", "train.steps=240", "train.eval_every=40", "train.threads=1",
    "checkpoint.every=15", "checkpoint.weights_every=120", "probe.every=5", "probe.tokens=16",
    "probe.scan_tokens=64", "logger=none", "hydra.launcher.parallel=2", "hydra.launcher.timeout_s=600",
]  # fmt: skip
DISK_MIB = 64
MAX_STARTS = 300  # of one sweep
EVENTS = {  # what happens, and how often compared with the others
    ("job", signal.SIGKILL): 4,
    ("job", signal.SIGTERM): 2,
    ("job", signal.SIGINT): 1,
    ("sweep", signal.SIGKILL): 1,
    ("sweep", signal.SIGTERM): 1,
    ("disk", None): 2,
}


class Sweep:
    """The sweep in a folder of its own, as a process."""

    def __init__(self, folder: Path):
        self.folder, self.starts = folder, 0
        self.outputs = folder / "outputs"
        self.outputs.mkdir(parents=True)

    def start(self) -> None:
        """Start it, or start it again."""
        self.starts += 1
        arms = [f"+hydra.sweeper.arms.{name}={json.dumps(line)}" for name, line in ARMS.items()]
        command = [sys.executable, str(ROOT / "train.py"), "-m", *SWEEP, *arms]
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        with (self.folder / "sweep.log").open("ab") as log:
            env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command, cwd=self.folder, stdout=log, stderr=log, env=env, start_new_session=True
            )

    def jobs(self) -> list[int]:
        """The processes of its jobs, those of a killed sweep too: all that live in its folder but itself."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                if Path(os.readlink(entry / "cwd")) == self.folder and b"hydra.mode=RUN" in (
                    entry / "cmdline"
                ).read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self.process.pid]

    def runs(self) -> list[str]:
        """The names of its run directories."""
        return sorted(path.parent.name for path in self.outputs.glob("soak/*/config.yaml"))

    def said(self, words: str) -> int:
        """How often its jobs printed something."""
        return sum(path.read_text(errors="replace").count(words) for path in self.outputs.glob("soak/*.log"))


class Disk:
    """A tmpfs on a folder, which can be filled."""

    def __init__(self, folder: Path):
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
        self.folder = folder
        self.mounted = (
            shutil.which("mount") is not None and not subprocess.run(command, capture_output=True).returncode
        )

    def fill(self, seconds: float) -> None:
        """Nothing can be written for some seconds."""
        filler = self.folder / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
        time.sleep(seconds)
        filler.unlink()

    def empty(self) -> None:
        """Give the disk back."""
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


def storm(sweep: Sweep, disk: Disk, draw: random.Random, pause_s: float) -> collections.Counter[str]:
    """Run a sweep to its end through what comes its way; counts of that."""
    counts: collections.Counter[str] = collections.Counter()
    sweep.start()
    while True:
        with suppress(subprocess.TimeoutExpired):
            if sweep.process.wait(timeout=draw.expovariate(1 / pause_s)) == 0:
                return counts
            if sweep.starts == MAX_STARTS:
                raise RuntimeError(f"not done after {MAX_STARTS} starts: see {sweep.folder}")
            sweep.start()
            continue
        ((whom, signum),) = draw.choices(list(EVENTS), list(EVENTS.values()))
        if whom == "disk" and disk.mounted:
            disk.fill(draw.uniform(1, 4))
            counts["full disks"] += 1
        elif whom == "job" and (jobs := sweep.jobs()):
            with suppress(ProcessLookupError):
                os.kill(draw.choice(jobs), signum)
                counts[f"{signum.name} to a job"] += 1
        elif whom == "sweep":
            sweep.process.send_signal(signum)
            counts[f"{signum.name} to the sweep"] += 1
            if signum == signal.SIGTERM and draw.random() < 0.3:
                sweep.process.send_signal(signum)  # once more, and it does not wait


def lost(quiet: Sweep, other: Sweep) -> list[str]:
    """How the results of a sweep differ from those of the quiet one, and what `verify` finds in them."""
    found = [f"{name}: only in one of the sweeps" for name in set(quiet.runs()) ^ set(other.runs())]
    for name in sorted(set(quiet.runs()) & set(other.runs())):
        there, here = (sweep.outputs / "soak" / name for sweep in (quiet, other))
        found += [f"{name}: {line}" for line in (*unequal(there, here), *findings(here))]
        for file in ("checkpoints/step-000240/model.safetensors", "checkpoints/weights-000120.safetensors"):
            if (there / file).read_bytes() != (here / file).read_bytes():
                found.append(f"{name}: {file} has other bytes")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--pause", type=float, default=8.0, help="mean seconds between two events")
    parser.add_argument("--seed", type=int, default=0, help="of the events")
    parser.add_argument("--folder", type=Path, help="where all is kept (default: a temporary folder)")
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="ffnlab-soak-"))).resolve()
    draw = random.Random(args.seed)  # noqa: S311
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the clean-ups
    quiet = Sweep(folder / "quiet")
    quiet.start()
    if quiet.process.wait():
        print((folder / "quiet/sweep.log").read_text())
        return 1
    print(f"quiet sweep: {len(quiet.runs())} runs", flush=True)
    total: collections.Counter[str] = collections.Counter()
    begin, losses, rounds = time.monotonic(), list[str](), 0
    while time.monotonic() < begin + 60 * args.minutes:
        rounds += 1
        sweep = Sweep(folder / f"storm-{rounds}")
        disk = Disk(sweep.outputs)
        try:
            total += storm(sweep, disk, draw, args.pause)
            total["resumes"] += sweep.said("going on with")
            total["starts at step 0 again"] += sweep.said("begins again at step 0")
            total["messages of a full disk"] += sweep.said("the disk is full")
            total["refused by a lock"] += sweep.said("is in use by process")
            total["starts of the sweep"] += sweep.starts
            new = lost(quiet, sweep)
            losses += [f"storm-{rounds}: {line}" for line in new]
            if new:
                shutil.copytree(sweep.outputs, sweep.folder / "kept")
        finally:
            if sweep.process.poll() is None:
                os.killpg(sweep.process.pid, signal.SIGKILL)
            disk.empty()
        passed = (time.monotonic() - begin) / 60
        figures = {"minutes": round(passed, 1), "sweeps": rounds, "runs": rounds * len(quiet.runs())}
        print(json.dumps({**figures, **dict(sorted(total.items())), "losses": len(losses)}), flush=True)
    if not disk.mounted:
        print("no disk was filled: a file system cannot be mounted here")
    print("\n".join(losses) or "every result is that of the quiet sweep")
    if not losses and args.folder is None:
        shutil.rmtree(folder)
    return bool(losses)


if __name__ == "__main__":
    sys.exit(main())
