"""What is shown while a run goes on."""

import io
import math
import re

from rich.console import Console

from ffnlab.record.console import ConsoleSink, columns

ROW = {
    "step": 1,
    "train/loss": 5.12345,
    "perf/tok_per_s": 12345.6,
    "probe/activity/L00/active_frac": 0.2,
    "probe/activity/L01/active_frac": 0.4,
    "probe/activity/L00/dead_frac": 0.9,
    "probe/threshold/L00/c": 0.5,
    "probe/threshold/L01/c": -0.1,
}


def run(console: Console, rows, steps: int) -> None:
    sink = ConsoleSink(console)
    sink.start({}, {"train": {"steps": steps}})
    for row in rows:
        sink.log(row)
    sink.finish("done", {})


def test_columns_stand_only_where_there_is_a_metric():
    assert columns(ROW) == {"loss": "5.1235", "tok/s": "12,346", "active": "0.300", "C": "0.2000"}
    assert columns({"step": 1, "train/loss": math.nan, "val/loss": math.inf}) == {"loss": "nan", "val": "inf"}
    assert columns({"step": 1, "train/loss": None}) == {}


def test_plain_lines_without_a_terminal():
    out = io.StringIO()
    rows = [{"step": step, "train/loss": 3.0} for step in range(1, 1001)]
    rows[0] |= ROW
    rows[776]["val/loss"] = 2.5
    run(Console(file=out, width=40), rows, 1000)
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert 50 <= len(lines) <= 65
    assert lines[0] == "step    1/1000  loss 5.1235  tok/s 12,346  active 0.300  C 0.2000"
    assert re.fullmatch(
        r"step    2/1000  eta \d+:\d\d  loss 3.0000  tok/s 12,346  active 0.300  C 0.2000", lines[1]
    )
    assert any(line.startswith("step  777/1000") and "val 2.5000" in line for line in lines)
    assert lines[-1].startswith("step 1000/1000")


def test_live_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    run(console, [ROW, {"step": 2, "train/loss": 4.0, "val/loss": 4.5}, {"step": 3, "train/loss": 3.5}], 3)
    text = out.getvalue()
    for words in ("3/3", "3.5000", "4.5000", "12,346", "0.300", "0.2000", "loss", "tok/s", "active"):
        assert words in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back
