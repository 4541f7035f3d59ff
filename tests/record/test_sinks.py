"""No sink can stop or hang a run."""

import threading
import time
import warnings
from pathlib import Path

import pytest

from ffnlab.record.sinks import Sink, Sinks


class Noting(Sink):
    """Notes its calls; raises or hangs in the method named."""

    def __init__(self, bad: str = "", error: BaseException | None = None):
        self.calls: list[str] = []
        self.bad, self.error, self.release = bad, error, threading.Event()
        self.start_s = self.call_s = self.finish_s = 0.2

    def _do(self, name: str) -> None:
        self.calls.append(name)
        if name == self.bad:
            if self.error:
                raise self.error
            self.release.wait(30)

    def start(self, info, config):
        self._do("start")

    def log(self, row):
        self._do("log")

    def histograms(self, step, values):
        self._do("histograms")

    def image(self, name, path, step):
        self._do("image")

    def finish(self, status, summary):
        self._do("finish")


ALL = ["start", "log", "histograms", "image", "log", "finish"]


def drive(sinks: Sinks) -> None:
    sinks.start({"id": "x"}, {})
    sinks.log({"step": 1})
    sinks.histograms(1, {})
    sinks.image("figure", Path("x.png"), 1)
    sinks.log({"step": 2})
    sinks.finish("done", {})
    sinks.finish("done", {})


def test_calls_arrive_in_order_once():
    sink = Noting()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drive(Sinks([sink]))
    assert sink.calls == ALL


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("bad", ["start", "log", "histograms", "image", "finish"])
def test_one_that_raises_is_off_after_one_warning(bad: str, error: BaseException):
    sink, other = Noting(bad, error), Noting()
    with pytest.warns(UserWarning, match=f"Noting is off .*{bad} failed: {type(error).__name__}") as caught:
        drive(Sinks([sink, other]))
    assert len(caught) == 1
    before = ALL[: ALL.index(bad) + 1]
    assert sink.calls == (before if bad == "finish" else [*before, "finish"])  # it may keep what it has
    assert other.calls == ALL


@pytest.mark.parametrize("bad", ["start", "log", "finish"])
def test_one_that_hangs_is_left_behind(bad: str):
    sink, other = Noting(bad), Noting()
    begun = time.monotonic()
    with pytest.warns(UserWarning, match=f"{bad} did not come back") as caught:
        drive(Sinks([sink, other]))
    assert time.monotonic() - begun < 2
    assert len(caught) == 1
    assert sink.calls == ALL[: ALL.index(bad) + 1]
    assert other.calls == ALL
    sink.release.set()


def test_a_process_ends_although_a_sink_hangs(start):
    code = """
import time
from ffnlab.record.sinks import Sink, Sinks
class Hangs(Sink):
    call_s = 0.2
    def log(self, row): time.sleep(600)
sinks = Sinks([Hangs()])
sinks.start({}, {}); sinks.log({"step": 1}); sinks.finish("done", {}); print("over")
"""
    out, err = start(code).communicate(timeout=20)
    assert out == "over\n"
    assert "Hangs is off" in err


def test_before_start_and_none_at_all():
    sinks = Sinks([Sink()])
    sinks.log({"step": 1})
    sinks.finish("done", {})
    drive(Sinks())
    drive(Sinks([Sink()]))


def test_a_call_is_cheap():
    sinks = Sinks([Sink(), Sink()])
    sinks.start({}, {})
    begun = time.perf_counter()
    for step in range(200):
        sinks.log({"step": step})
    assert (time.perf_counter() - begun) / 200 < 0.005
