"""A W&B workspace and report for a set of runs, as code. The extra `dash` brings the library."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ffnlab.errors import UserError
from ffnlab.record.wandb import ACTIVE, logged_in

PATIENCE_S = 60.0  # for both to be saved
PER_ROW, WIDTH, HEIGHT = 3, 8, 6  # a row of a report is 24 units wide


@dataclass(frozen=True)
class Contents:
    """What there is to show of the runs; all names are those of metrics.jsonl and config.yaml."""

    title: str
    entity: str  # "" is that of the key
    project: str
    group: str | None  # the W&B group that holds the runs, and those that are to come
    ids: Sequence[str]  # else these runs alone
    arms: Sequence[str]  # config keys that make the arms
    losses: Sequence[str]
    active: Sequence[str]  # probe/activity/L03/active_frac, by layer
    thresholds: Sequence[str]  # probe/threshold/L03/c, by layer
    varied: Sequence[str]  # config keys that differ between runs
    text: str  # above the report's figures


@dataclass(frozen=True)
class Section:
    """Panels under one heading; `by_arm`: drawn for arms, else for single runs."""

    name: str
    by_arm: bool
    panels: list[Any]


def require() -> None:
    """UserError unless the extra is installed."""
    try:
        import wandb_workspaces  # noqa: F401
    except ModuleNotFoundError:
        raise UserError("needs wandb-workspaces: pip install -e '.[dash]'") from None


def sections(contents: Contents) -> Iterator[Section]:
    """What is shown, in order: only what was recorded."""
    from wandb_workspaces.reports.v2 import interface as wr

    def curve(metric: str) -> Any:
        return wr.LinePlot(title=metric, x="step", y=[metric])

    def by_layer(metrics: Sequence[str], title: str) -> list[Any]:
        last = wr.BarPlot(title=f"{title} by layer, at the end", metrics=list(metrics), orientation="v")
        return [last, *map(curve, metrics)]

    yield Section("Loss", True, [curve(metric) for metric in contents.losses])
    if contents.active:
        yield Section("Active fraction by layer", True, by_layer(contents.active, "active fraction"))
    if contents.thresholds:
        yield Section("C by layer", True, by_layer(contents.thresholds, "C"))
    loss = contents.losses[-1]
    if contents.active:
        x, y = wr.SummaryMetric(ACTIVE), wr.SummaryMetric(loss)
        plot = wr.ScatterPlot(title=f"{loss} against the active fraction", x=x, y=y)
        yield Section("Sparsity against loss", False, [plot])
    axes = [wr.Config(key) for key in dict.fromkeys([*contents.arms, *contents.varied])]
    ends = [wr.SummaryMetric(name) for name in [*([ACTIVE] if contents.active else []), loss]]
    columns = [wr.ParallelCoordinatesPlotColumn(metric=metric) for metric in [*axes, *ends]]
    plot = wr.ParallelCoordinatesPlot(title=f"what leads to {loss}", columns=columns)
    yield Section("Parallel coordinates", False, [plot])


def workspace(contents: Contents) -> Any:
    """The workspace: its runs are grouped by arm."""
    import wandb_workspaces.workspaces as ws

    return ws.Workspace(
        entity=contents.entity,
        project=contents.project,
        name=contents.title,
        sections=[
            ws.Section(name=section.name, panels=section.panels, is_open=True)
            for section in sections(contents)
        ],
        settings=ws.WorkspaceSettings(x_axis="step", max_runs=50),
        runset_settings=ws.RunsetSettings(
            filters=chosen(contents), groupby=[ws.Config(key) for key in contents.arms]
        ),
    )


def report(contents: Contents) -> Any:
    """The report: curves by arm, scatter and parallel coordinates by run."""
    from wandb_workspaces.reports.v2 import interface as wr

    blocks: list[Any] = [wr.P(contents.text)]
    for section in sections(contents):
        for at, panel in enumerate(section.panels):
            row, column = divmod(at, PER_ROW)
            panel.layout = wr.Layout(x=column * WIDTH, y=row * HEIGHT, w=WIDTH, h=HEIGHT)
        if len(section.panels) == 1:
            section.panels[0].layout = wr.Layout(w=PER_ROW * WIDTH, h=2 * HEIGHT)
        # No entity: a set of runs that names one is looked up on the server; without, it is the report's.
        runs = wr.Runset(
            project=contents.project,
            name="by arm" if section.by_arm else "runs",
            filters=chosen(contents),
            groupby=[f"config.{key}" for key in contents.arms] if section.by_arm else [],
        )
        blocks += [wr.H2(section.name), wr.PanelGrid(runsets=[runs], panels=section.panels)]
    return wr.Report(
        entity=contents.entity, project=contents.project, title=contents.title, blocks=blocks, width="fluid"
    )


def chosen(contents: Contents) -> Any:
    """The filter that leaves the runs of `contents`."""
    from wandb_workspaces import expr

    if contents.group is not None:
        return expr.And(expr.Metric("Group") == contents.group)
    return expr.And(expr.Metric("ID").isin(list(contents.ids)))


def spec(contents: Contents) -> dict[str, Any]:
    """Both as W&B stores them; needs neither key nor server."""
    models = {"workspace": workspace(contents)._to_model(), "report": report(contents)._to_model()}
    return {
        name: model.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        for name, model in models.items()
    }


def save(contents: Contents) -> dict[str, str]:
    """Save both as new ones; their addresses. UserError without a key, and when the server does not take
    them in time.
    """
    if not logged_in():
        raise UserError(
            "needs a W&B key and there is none: run `wandb login` or set WANDB_API_KEY; "
            "--json FILE writes what would be sent"
        )

    def send() -> dict[str, str]:
        import wandb

        wandb.setup(wandb.Settings(silent=True))  # the addresses are said once, by the command
        whose = contents.entity or wandb.Api().default_entity
        own = Contents(**{**vars(contents), "entity": str(whose)})
        return {"workspace": workspace(own).save().url, "report": report(own).save().url}

    return within(PATIENCE_S, send)


def within(seconds: float, call: Callable[[], dict[str, str]]) -> dict[str, str]:
    """call(), in a thread that can be left behind."""
    answer: list[Any] = []

    def run() -> None:
        try:
            answer.append(call())
        except BaseException as error:  # of whatever kind the library finds
            answer.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answer:
        raise UserError(f"W&B did not answer within {seconds:.0f} s: is the server there? Try again later")
    if isinstance(answer[0], BaseException):
        why = " ".join(str(answer[0]).split())[:300] or type(answer[0]).__name__
        raise UserError(f"W&B did not take the dashboard: {why}") from answer[0]
    return answer[0]
