"""`ffnlab dashboard`: the workspace and the report as W&B would store them, and a server of our own."""

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ffnlab.analysis.verbs import dashboard as verb
from ffnlab.errors import UserError
from ffnlab.record import dashboard
from ffnlab.record.metrics import Metrics

pytest.importorskip("wandb_workspaces")
HERE = Path(__file__).parent
ACTIVE = [f"probe/activity/L0{i}/active_frac" for i in range(3)]
C = [f"probe/threshold/L0{i}/c" for i in range(2)]  # the last layer has none


def write(folder: Path, arm: str | None, seed: int, **own: Any) -> None:
    path = folder / f"{arm}-s{seed}"
    path.mkdir(parents=True)
    logger = {"project": "bench", "entity": None, "group": folder.name}
    config = {
        "seed": seed,
        "study": folder.name,
        "arm": arm,
        "logger": logger,
        "optim": {"lr": 0.1 * len(arm or "")},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config | own))
    (path / "run.json").write_text(json.dumps({"id": f"id{arm}{seed}", "name": path.name, "status": "done"}))
    metrics = Metrics(path / "metrics.jsonl")
    metrics.append({"step": 0, "val/loss": 5.0, **dict.fromkeys(ACTIVE, 0.5)})
    metrics.append({"step": 1, "train/loss": 4.0, **(dict.fromkeys(C, 0.1) if arm == "learned" else {})})
    metrics.close()


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two arms, two seeds; one of them learns C in two of three layers."""
    for arm in ("none", "learned"):
        for seed in (0, 1):
            write(tmp_path / "thresholds", arm, seed)
    return tmp_path / "thresholds"


def call(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(list(map(str, argv))))


def written(study: Path, *argv: object) -> dict[str, Any]:
    file = study.parent / "spec.json"
    assert call(study, "--json", file, *argv) == 0
    return json.loads(file.read_text())


def shown(panel: dict[str, Any]) -> tuple[str, Any]:
    config = panel["config"]
    axes = [c["accessor"] for c in config.get("columns", [])] or config.get("metrics")
    return panel["viewType"], axes or (config["xAxis"], config["yAxis"])


LAST = "summary:probe/activity/active_frac", "summary:val/loss"
PANELS = {
    "Loss": [("Run History Line Plot", [m]) for m in ("train/loss", "val/loss")],
    "Active fraction by layer": [("Bar Chart", ACTIVE), *[("Run History Line Plot", [m]) for m in ACTIVE]],
    "C by layer": [("Bar Chart", C), *[("Run History Line Plot", [m]) for m in C]],
    "Sparsity against loss": [("Scatter Plot", LAST)],
    "Parallel coordinates": [
        ("Parallel Coordinates Plot", ["config:arm.value", "config:optim.value.lr", *LAST]),
    ],
}


def test_the_workspace_shows_what_was_recorded_by_arm(study: Path):
    section = written(study)["workspace"]["section"]
    made = section["panelBankConfig"]["sections"]
    assert {s["name"]: [shown(p) for p in s["panels"]] for s in made} == PANELS
    assert all(p["config"]["xAxis"] == "step" for p in made[0]["panels"])
    assert all(s["isOpen"] for s in made)
    (runs,) = section["runSets"]
    assert runs["grouping"] == [{"section": "config", "name": "arm.value"}]
    (chosen,) = runs["filters"]["filters"]
    assert (chosen["key"], chosen["op"], chosen["value"]) == (
        {"section": "run", "name": "group"},
        "=",
        "thresholds",
    )
    assert section["settings"]["shouldAutoGeneratePanels"] is False


def test_the_report_groups_curves_by_arm_and_shows_runs_one_by_one_elsewhere(study: Path):
    blocks = written(study)["report"]["blocks"]
    names = [b["children"][0]["text"] for b in blocks if b["type"] == "heading"]
    grids = [b["metadata"] for b in blocks if b["type"] == "panel-grid"]
    panels = [g["panelBankSectionConfig"]["panels"] for g in grids]
    assert {n: [shown(p) for p in ps] for n, ps in zip(names, panels, strict=True)} == PANELS
    grouped = [g["runSets"][0]["grouping"] for g in grids]
    arm = [{"section": "config", "name": "arm.value"}]
    assert grouped == [arm, arm, arm, [], []]
    assert all(g["runSets"][0]["filters"]["filters"][0]["value"] == "thresholds" for g in grids)
    places = [(p["layout"]["x"], p["layout"]["y"]) for p in panels[1]]
    assert places == [(0, 0), (8, 0), (16, 0), (0, 6)]
    assert "4 runs" in json.dumps(blocks)


def test_runs_without_arm_or_group_are_named_and_grouped_by_what_differs(tmp_path: Path):
    folder = tmp_path / "it's"  # a name that the library cannot quote
    for seed, lr in ((0, 0.1), (1, 0.2)):
        write(folder, None, seed, optim={"lr": lr})
    section = written(folder)["workspace"]["section"]
    (runs,) = section["runSets"]
    assert runs["grouping"] == [{"section": "config", "name": "optim.value.lr"}]
    (chosen,) = runs["filters"]["filters"]
    assert (chosen["key"]["name"], chosen["op"], chosen["value"]) == ("name", "IN", ["idNone0", "idNone1"])
    assert "C by layer" not in [s["name"] for s in section["panelBankConfig"]["sections"]]


def test_what_cannot_be_shown_is_said(study: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dashboard, "logged_in", lambda: False)
    with pytest.raises(UserError, match=r"needs a W&B key.*wandb login.*--json FILE"):
        call(study)
    write(study, "other", 0, logger={"project": "elsewhere"})
    with pytest.raises(UserError, match="several W&B projects, bench, elsewhere"):
        call(study)
    assert written(study, "--project", "bench")
    write(study.parent / "plain", "a", 0, logger={})
    with pytest.raises(UserError, match=r"ffnlab sync RUN\.\.\. --project NAME"):
        call(study.parent / "plain")
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[dash\]'"):
        call(study)


def test_a_server_that_hangs_is_not_waited_for():
    never = socket.socket()
    never.bind(("127.0.0.1", 0))
    never.listen()

    def hang() -> dict[str, str]:
        socket.create_connection(never.getsockname()).recv(1)
        return {}

    with pytest.raises(UserError, match="did not answer within 0 s"):
        dashboard.within(0.2, hang)
    with pytest.raises(UserError, match="did not take the dashboard: no such project"):
        dashboard.within(5, lambda: (_ for _ in ()).throw(ValueError("no such\nproject")))
    never.close()


@pytest.mark.slow
def test_a_server_gets_both(study: Path, tmp_path: Path):
    server = subprocess.Popen(
        [sys.executable, str(HERE / "wandb_server.py")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        env = {**os.environ, "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": url, "HOME": str(tmp_path)}
        env.pop("WANDB_SERVICE", None)  # that of this process: the child would end it with itself
        code = "import sys; from ffnlab.cli import main; sys.exit(main(['dashboard', sys.argv[1]]))"
        done = subprocess.run(
            [sys.executable, "-c", code, str(study)], env=env, capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stderr
        sent = [json.loads(server.stdout.readline()) for _ in range(2)]
    finally:
        server.kill()
    workspace, report = done.stdout.splitlines()
    assert workspace.startswith(f"workspace: {url}/me/bench?nw=")
    assert report.startswith(f"report: {url}/me/bench/reports/thresholds--")
    assert [view["type"] for view in sent] == ["project-view", "runs"]
    names = [s["name"] for s in sent[0]["spec"]["section"]["panelBankConfig"]["sections"]]
    assert names == list(PANELS)
