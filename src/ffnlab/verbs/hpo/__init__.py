"""Search for the best overrides with Optuna: ffnlab hpo SPACE.yaml.

SPACE.yaml says what to search and how:

    study: swiglu-lr                    # runs lie under outputs/swiglu-lr/
    trials: 20                          # in all, over every call of the command
    metric: val/loss                    # to be small
    seed: 0                             # of the search
    fixed: [ffn=swiglu, train.steps=200, train.eval_every=50]
    space:
      optim.lr: {low: 0.002, high: 0.1, log: true}
      ffn.expansion: {low: 2, high: 8, step: 1}
      act: {choices: [silu, relu2]}
    prune_after: 5                      # finished trials before bad ones are stopped early; null: never

Every trial is `python train.py` with a list of overrides, in a process of its own. The search is kept in
outputs/STUDY/optuna.jsonl: the same command goes on where it stopped, and unfinished trials resume from their
checkpoints. A trial whose metric is worse than the median of the others at the same step is stopped; one that
diverges counts as infinitely bad, one that fails is left out.
"""

import argparse
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ffnlab.errors import UserError
from ffnlab.record.metrics import Metrics
from ffnlab.record.rundir import read_info
from ffnlab.verbs import show
from ffnlab.verbs.hpo.plan import Plan, read_plan

OUTPUTS = Path("outputs")
POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("space", type=Path, metavar="SPACE.yaml", help="what to search, see above")
    parser.add_argument(
        "--train",
        type=Path,
        default=Path("train.py"),
        metavar="FILE",
        help="default: train.py of this folder",
    )


def run(args: argparse.Namespace) -> int:
    try:
        import optuna
    except ModuleNotFoundError:
        raise UserError("needs Optuna: pip install -e '.[hpo]'") from None
    plan = read_plan(args.space)
    if not args.train.is_file():
        raise UserError(
            f"{args.train} is not there: call from the folder that holds train.py, or say --train"
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = open_study(plan)
    for trial in unfinished(study):
        one(trial, plan, study, args.train)
    over = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.FAIL)
    while len(study.get_trials(deepcopy=False, states=over)) < plan.trials:
        one(study.ask(), plan, study, args.train)
    return summary(study, plan)


def open_study(plan: Plan) -> Any:
    """The search so far, or a new one."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    folder = OUTPUTS / plan.study
    folder.mkdir(parents=True, exist_ok=True)
    pruner = (
        optuna.pruners.NopPruner()
        if plan.prune_after is None
        else optuna.pruners.MedianPruner(n_startup_trials=plan.prune_after)
    )
    return optuna.create_study(
        study_name=plan.study,
        storage=JournalStorage(JournalFileBackend(str(folder / "optuna.jsonl"))),
        pruner=pruner,
        direction="minimize",
        load_if_exists=True,
    )


def unfinished(study: Any) -> list[Any]:
    """Trials that a kill left running: they are taken up again."""
    import optuna

    left = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
    return [optuna.trial.Trial(study, frozen._trial_id) for frozen in left]


def suggest(trial: Any, space: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The overrides of a trial."""
    chosen = []
    for key, node in space.items():
        if "choices" in node:
            value = trial.suggest_categorical(key, node["choices"])
        elif all(isinstance(node[end], int) for end in ("low", "high")) and not node.get("log"):
            value = trial.suggest_int(key, node["low"], node["high"], step=node.get("step", 1))
        else:
            value = trial.suggest_float(
                key, node["low"], node["high"], step=node.get("step"), log=node.get("log", False)
            )
        chosen.append(f"{key}={value}")
    return chosen


def one(trial: Any, plan: Plan, study: Any, train: Path) -> None:
    """Run a trial to its end, and tell the study how it went."""
    import optuna

    # Seeded by trial: a search that is continued draws what it would have drawn in one go.
    study.sampler = optuna.samplers.TPESampler(seed=(plan.seed + 1_000_003 * trial.number) % 2**32)
    out = OUTPUTS / plan.study / f"trial-{trial.number:04d}"
    overrides = [*plan.fixed, *suggest(trial, plan.space), f"out={out}", f"study={plan.study}", "arm=trial"]
    log = out.with_name(f"{out.name}.log")
    print(f"trial {trial.number}: {' '.join(overrides)}", flush=True)
    with log.open("ab") as file:
        job = subprocess.Popen([sys.executable, str(train), *overrides], stdout=file, stderr=file)
        try:
            pruned = watch(job, out / "metrics.jsonl", plan.metric, trial)
        except BaseException:  # Ctrl-C: the job saves its state, and the trial stays unfinished
            stop(job)
            raise
    state, value = optuna.trial.TrialState.COMPLETE, last(out / "metrics.jsonl", plan.metric)
    if pruned:
        state, value = optuna.trial.TrialState.PRUNED, None  # Optuna takes its last report
    elif job.returncode == 3 or (value is not None and not math.isfinite(value)):
        value = math.inf
    elif job.returncode != 0 or value is None:
        state, value = optuna.trial.TrialState.FAIL, None
        print(f"  failed with exit code {job.returncode}: see {log}", flush=True)
    shown = "" if value is None else f" {plan.metric} {value:.4f}"
    print(f"  {read_info(out).get('status', 'failed')}{shown}", flush=True)
    study.tell(trial.number, value, state=state, skip_if_finished=True)


def watch(job: subprocess.Popen, metrics: Path, metric: str, trial: Any) -> bool:
    """Wait for the job, report its metric by step; True when it was stopped for being worse than others."""
    told = trial.study.get_trials(deepcopy=False)[trial.number]
    reported = set(told.intermediate_values)  # before a kill, where this one is taken up again
    while job.poll() is None:
        time.sleep(POLL_S)
        for row in Metrics(metrics).read() if metrics.exists() else []:
            if metric in row and row["step"] > 0 and row["step"] not in reported:
                reported.add(row["step"])
                if math.isfinite(row[metric]):
                    trial.report(row[metric], row["step"])
                if trial.should_prune():
                    stop(job)
                    return True
    return False


def stop(job: subprocess.Popen, patience_s: float = 60.0) -> None:
    """SIGTERM, which lets the job save its state; SIGKILL when it does not end."""
    job.send_signal(signal.SIGTERM)
    try:
        job.wait(patience_s)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def last(metrics: Path, metric: str) -> float | None:
    """The last value of a metric, None where there is none."""
    rows = Metrics(metrics).read() if metrics.exists() else []
    return next((float(row[metric]) for row in reversed(rows) if metric in row), None)


def summary(study: Any, plan: Plan) -> int:
    """The table of the trials, best first, and the best command; exit code 1 when none was completed."""
    trials = study.get_trials(deepcopy=False)
    order: Callable[[Any], float] = lambda t: math.inf if t.value is None else t.value  # noqa: E731
    rows = [
        (
            str(trial.number),
            trial.state.name.lower(),
            "" if trial.value is None else f"{trial.value:.4f}",
            " ".join(f"{key}={value}" for key, value in trial.params.items()),
        )
        for trial in sorted(trials, key=order)
    ]
    show(f"{plan.study}: {plan.metric}", ("trial", "state", plan.metric, "overrides"), rows)
    finished = [t for t in trials if t.state.name == "COMPLETE" and math.isfinite(t.value)]
    if not finished:
        return 1
    best = min(finished, key=order)
    print(f"\nbest: python train.py {' '.join([*plan.fixed, *(f'{k}={v}' for k, v in best.params.items())])}")
    return 0
