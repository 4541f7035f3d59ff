"""Every study: its jobs compose, and its folder says what it asks."""

from pathlib import Path

import pytest
import yaml

from ffnlab import build
from ffnlab.validate import validate
from hydra_plugins.ffnlab_sweep._jobs import Job, expand

ROOT = Path(__file__).resolve().parents[1]
STUDIES = sorted(path.stem for path in ROOT.glob("configs/experiment/*.yaml"))


def jobs(study: str) -> list[Job]:
    node = yaml.safe_load((ROOT / f"configs/experiment/{study}.yaml").read_text(encoding="utf-8"))["hydra"]
    assert node["mode"] == "MULTIRUN"
    return expand([], node["sweeper"].get("params", {}), node["sweeper"]["arms"])


@pytest.mark.parametrize("study", STUDIES)
def test_every_arm_composes_and_is_valid(study: str):
    by_arm = {job.label: job for job in jobs(study)}
    for job in by_arm.values():
        cfg, _ = build.compose([f"experiment={study}", *job.overrides])
        validate(cfg)
        build.model(cfg, 300)


@pytest.mark.parametrize("study", STUDIES)
def test_seeds_are_shared_by_all_arms_but_where_they_are_the_question(study: str):
    seeds: dict[str, set[str]] = {}
    for job in jobs(study):
        seeds.setdefault(job.label, set()).update(o for o in job.overrides if o.startswith("seed="))
    if study != "seed_noise":
        assert len({frozenset(values) for values in seeds.values()}) == 1
        assert all(len(values) >= 3 for values in seeds.values())
