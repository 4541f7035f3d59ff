"""A run that logs online to the server whose process id is argv[2], and kills that server on the way."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

from ffnlab.record.sinks import Sinks
from ffnlab.record.wandb import WandbSink

folder, server = Path(sys.argv[1]), int(sys.argv[2])
sink = WandbSink(
    mode="auto",
    project="p",
    entity=None,
    group=None,
    tags=[],
    job_type=None,
    finish_timeout=1,
    artifact=False,
)
print("mode", sink.mode)
sinks = Sinks([sink])
warnings.simplefilter("always")
sinks.start({"id": "abc", "name": "n", "path": str(folder)}, {"a": 1})
print("mode", sink.mode)
for step in range(500):
    if step == 100:
        os.kill(server, signal.SIGKILL)
    sinks.log({"step": step, "train/loss": 1.0})
begun = time.monotonic()
sinks.finish("done", {"val/loss": 1.0})
print("finish_s", time.monotonic() - begun)
