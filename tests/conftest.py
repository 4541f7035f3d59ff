"""What every test shares: one thread, no network, no account, one cache of tokenised text."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: xdist runs one process per core
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
for name in [
    name
    for name in os.environ
    if re.fullmatch("WANDB_(API_KEY|BASE_URL|PROJECT|ENTITY|DIR|RUN_ID|SWEEP_ID)", name)
]:
    del os.environ[name]  # a test never writes to the account of the person who runs it

import pytest  # noqa: E402
import torch  # noqa: E402

# Here and not by our modules: while jaxtyping loads one of those, Python finds no bytecode of anything else.
import torch._dynamo  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def ffnlab_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """FFNLAB_CACHE for this process and those it starts: one folder, also for several xdist workers."""
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ffnlab-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FFNLAB_CACHE", str(cache))
        yield cache


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).resolve().parents[1]
