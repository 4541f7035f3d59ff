"""One table, four ways to write it."""

import csv
import io
import json

import pytest

from ffnlab.analysis.tables import Column, Table, markdown, show, to_csv, to_json

TABLE = Table(
    "a title",
    [Column("arm", "arm", left=True), Column("loss", "loss", "{:.2f}".format)],
    [{"arm": "stream=[a,b]|c", "loss": 3.14159}, {"arm": "x" * 300}],
)


def test_markdown_escapes_what_would_break_a_row():
    assert markdown(TABLE).splitlines()[:3] == [
        "| arm | loss |",
        "| --- | ---: |",
        "| stream=[a,b]\\|c | 3.14 |",
    ]
    assert markdown(TABLE).endswith("x | - |")


def test_a_file_holds_all_digits():
    rows = list(csv.DictReader(io.StringIO(to_csv(TABLE))))
    assert rows == [{"arm": "stream=[a,b]|c", "loss": "3.14159"}, {"arm": "x" * 300, "loss": ""}]


def test_json_has_no_nan():
    text = to_json({"a": [float("nan"), float("inf"), 1.5], "b": (None, "x")})
    assert json.loads(text) == {"a": [None, None, 1.5], "b": [None, "x"]}


def test_the_console_cuts_nothing_and_reads_no_markup(capsys: pytest.CaptureFixture[str]):
    show(TABLE)
    printed = capsys.readouterr().out
    assert "stream=[a,b]|c  3.14" in " ".join(printed.split(" ")).replace(" " * 286, "")
    assert "x" * 300 in printed
