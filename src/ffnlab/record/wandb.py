"""Weights & Biases: a copy of the record that can neither stop nor hang a training."""

import configparser
import netrc
import os
import re
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ffnlab.errors import UserError, unknown
from ffnlab.record.metrics import Metrics
from ffnlab.record.sinks import Sink, finite_edges
from ffnlab.record.store import open_store

_MODES = ("auto", "online", "offline", "disabled")
_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
_INIT_S = 20.0
_MAX_BINS = 512  # of wandb.Histogram
ACTIVE = "probe/activity/active_frac"  # in W&B's summary alone: the mean over layers, for scatter plots


class WandbSink(Sink):
    """One W&B run with the id of the run directory.

    `mode`: auto (online when the user is logged in, else offline; $WANDB_MODE decides when it is set),
    online, offline, disabled. Sent are the config, the metrics, histograms and images; not the console, code,
    git state, environment or machine. The axis of all metrics is `step`.

    A resumed run keeps its id. Online the server drops the steps that it has (they are the same to the bit).
    Offline, W&B writes a second folder, and syncing that would erase the first on the server; so the rows up
    to the resume are logged again, and the newest folder alone holds the whole run.

    Runs of a study share `group`, `tags` and `job_type`.
    `artifact`: at the end of a run that is done, neurons.zarr goes along as an artifact.
    `finish_timeout`: seconds to wait for the server at the end. Raises UserError for an unknown mode, and for
    mode=online without a key.
    """

    def __init__(
        self,
        *,
        mode: str,
        project: str,
        entity: str | None,
        group: str | None,
        tags: list[str],
        job_type: str | None,
        finish_timeout: float,
        artifact: bool,
    ):
        if mode not in _MODES:
            raise UserError(unknown("logger.mode", mode, _MODES))
        if not 0 < finish_timeout < float("inf"):
            raise UserError(
                f"logger.finish_timeout must be a positive number of seconds, got {finish_timeout}."
            )
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE", "") or ("online" if logged_in() else "offline")
            mode = mode if mode in _MODES[1:] else "offline"
        elif mode == "online" and not logged_in():
            raise UserError(
                "logger.mode=online needs a W&B key and there is none: run `wandb login`, set WANDB_API_KEY, "
                "or leave logger.mode=auto (offline without a key)."
            )
        self.mode = mode
        self.start_s = 2 * _INIT_S + 60  # a failed online start, an offline one, and the rows of a resume
        self.finish_s = finish_timeout + 15
        self._run: Any = None
        self._options = {"project": project, "entity": entity, "group": group, "tags": list(tags)}
        self._options["job_type"] = job_type
        self._finish_timeout = finish_timeout
        self._artifact = artifact

    def start(self, info: dict[str, Any], config: dict[str, Any]) -> None:
        """Start the run in `info["path"]`/wandb; a server that cannot be reached gives an offline run and a
        line.
        """
        if self.mode == "disabled":
            return
        resumed = bool(info.get("resumed"))
        self._record = Path(info["path"]) / "neurons.zarr"
        if self.mode == "online":
            try:
                self._run = self._init("online", info, config)
            except Exception as error:
                why = str(error).splitlines()[0] if str(error) else type(error).__name__
                warnings.warn(f"W&B cannot be reached ({why}): this run is recorded offline.", stacklevel=2)
                self.mode = "offline"
                self._forget()
        if self.mode == "offline":
            self._run = self._init("offline", info, config)
        key = "" if logged_in() else "`wandb login`, then "
        later = f"offline, in {info['path']}/wandb; {key}`ffnlab sync {info['path']}` sends it"
        print(f"W&B: {self._run.url if self.mode == 'online' else later}", file=sys.stderr)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("val/loss", step_metric="step", summary="min")
        if self.mode == "offline" and resumed:
            for row in Metrics(Path(info["path"]) / "metrics.jsonl").read():
                self.log(row)

    def log(self, row: dict[str, Any]) -> None:
        """Send one row of metrics at its step."""
        if self._run:
            self._run.log(
                {key: value for key, value in row.items() if value is not None}, step=int(row["step"])
            )

    def histograms(self, step: int, values: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Send counts over fixed edges; W&B itself would raise on a value that is not finite."""
        if self._run:
            import wandb

            made = {name: wandb.Histogram(np_histogram=bins(*pair)) for name, pair in values.items()}
            self._run.log(made | {"step": step}, step=step)

    def image(self, name: str, path: Path, step: int) -> None:
        """Send a PNG file."""
        if self._run:
            import wandb

            self._run.log({name: wandb.Image(str(path)), "step": step}, step=step)

    def finish(self, status: str, summary: dict[str, Any]) -> None:
        """Send the final numbers; a run that is not done shows as failed."""
        if not self._run:
            return
        try:
            self._run.summary.update({"status": status, **summary, **mean_active(summary)})
            if self._artifact and status == "done" and self._record.exists():
                self._send_record()
            self._run.finish(exit_code=0 if status == "done" else 1)
        except ConnectionError:  # W&B's own process is gone, and would be waited for again at exit
            self._forget()
            raise

    def _send_record(self) -> None:
        """neurons.zarr as an artifact of the run."""
        import wandb

        open_store(self._record)  # a link in it would send what it points to
        artifact = wandb.Artifact(f"neurons-{self._run.id}", type="neurons")
        artifact.add_dir(str(self._record))
        self._run.log_artifact(artifact)

    def _init(self, mode: str, info: dict[str, Any], config: dict[str, Any]) -> Any:
        # Its own error reports go to the server too, and at exit wait 30 s for one that does not answer.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # half a second: only a run that uses it pays it

        settings = wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_save_requirements=False,
            host="",
            x_disable_stats=True,
            x_disable_machine_info=True,
            init_timeout=_INIT_S,
            finish_timeout=self._finish_timeout,
        )
        return wandb.init(
            mode=mode,  # type: ignore[arg-type]
            dir=str(info["path"]),
            id=os.environ.get("WANDB_RUN_ID") or info["id"],  # a sweep agent gives each of its runs an id
            name=info["name"],
            config=config,
            resume="allow",
            allow_val_change=True,
            reinit="create_new",  # several runs of one process are several runs
            settings=settings,
            **self._options,
        )

    def _forget(self) -> None:
        """Leave W&B's own process, which keeps to itself the id of the run that it could not start."""
        import wandb

        with suppress(ConnectionError):
            wandb.teardown()
        os.environ.pop("WANDB_SERVICE", None)  # that of a parent, which teardown does not end


def logged_in() -> bool:
    """Whether W&B would find a key: $WANDB_API_KEY, or a netrc entry for the server that is set."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        machines = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    server = os.environ.get("WANDB_BASE_URL") or _server_in_settings()
    hosts = (urlsplit(server).netloc,) if server else _HOSTS
    return any(machines.get(host, ("", "", ""))[2] for host in hosts)


def mean_active(summary: dict[str, Any]) -> dict[str, float]:
    """The last active fractions of all layers as one number; nothing where none was recorded."""
    parts = [v for k, v in summary.items() if re.fullmatch(r"probe/activity/L\d+\w*/active_frac", k)]
    return {ACTIVE: sum(parts) / len(parts)} if parts else {}


def bins(counts: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts and edges as W&B takes them: finite, and at most 512 bins (neighbours are added up)."""
    counts, edges = np.asarray(counts), finite_edges(edges)
    if len(counts) > _MAX_BINS:
        starts = np.arange(0, len(counts), -(-len(counts) // _MAX_BINS))
        counts, edges = np.add.reduceat(counts, starts), np.append(edges[starts], edges[-1])
    return counts, edges


def _server_in_settings() -> str | None:
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(folder / "settings")
    except (OSError, configparser.Error):
        return None
    return settings.get("default", "base_url", fallback=None)
