"""What `bench sparse` says: rows of all cases, bounds by hand, messages."""

import csv
import json
from pathlib import Path

import pytest

from ffnlab.cli import main
from ffnlab.verbs.bench.sparse import crossovers

SMALL = ["bench", "sparse", "--shapes", "16x64", "--tokens", "32", "--rounds", "1"]


@pytest.mark.parametrize(("ffn", "whole", "token"), [("mlp", 6 / 1.5, 2 / 1.1), ("reglu", 9 / 1.8, 3 / 1.2)])
def test_rows_and_bounds(tmp_path: Path, capsys: pytest.CaptureFixture, ffn: str, whole: float, token: float):
    """5 products of an mlp follow the pre-activations, 8 of a gated unit; 1 and 2 matrices by rows."""
    file = tmp_path / "rows.csv"
    own = ["--densities", "0.1", "--csv", str(file), "--json", f"ffn={ffn}", "act=relu2", "train.device=cpu"]
    assert main([*SMALL, *own]) == 0
    facts = json.loads(capsys.readouterr().out)
    fp32 = [row for row in facts["rows"] if row["precision"] == "fp32"]
    assert [row["name"] for row in fp32[1:5]] == ["compact", "spmm", "sddmm", "spmm_t"]
    bounds = {row["section"]: row["bound"] for row in fp32}
    assert (bounds["ffn"], bounds["token"]) == (pytest.approx(whole), pytest.approx(token))
    assert min(facts["limits"].values()) > 0
    spmm, l2 = fp32[2], facts["limits"]["l2_bytes_per_s"]
    assert spmm["of_l2"] == pytest.approx(0.1 * 32 * 64 * 16 * 4 / (spmm["sparse_ms"] / 1e3) / l2)
    assert fp32[0]["sparse_saved_bytes"] < fp32[0]["dense_saved_bytes"]
    with file.open() as opened:
        assert len(list(csv.DictReader(opened))) == len(facts["rows"])


def test_table(capsys: pytest.CaptureFixture):
    assert main([*SMALL, "--densities", "0.05", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "16x64 fp32: dense and sparse take the same time at a density" in out


def test_auto_goes_the_way_of_its_table(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    table = [{"density": p, "dense_ms": 1.0, "sparse_ms": 5 * p} for p in (0.1, 0.4)]
    monkeypatch.setattr("ffnlab.verbs.bench.sparsity.timed", lambda *_: table)
    assert main([*SMALL, "--densities", "0.17", "0.19", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["density"]: row["auto"] for row in rows if row["section"] == "ffn"} == {
        0.17: "sparse",
        0.19: "dense",  # below the crossover of 0.2, but not by the margin of a layer that begins dense
    }


def test_crossover_of_the_rows():
    def row(density: float, speedup: float) -> dict:
        return {
            "section": "ffn",
            "shape": "1x1",
            "precision": "fp32",
            "density": density,
            "speedup": speedup,
        }

    assert "10.0%" in crossovers([row(0.05, 2), row(0.2, 0.5)])[0]
    assert "above all" in crossovers([row(0.05, 2), row(0.2, 1.5)])[0]
    assert "below all" in crossovers([row(0.05, 0.5), row(0.2, 0.1)])[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "16"], "--shapes 16: expected d_model x d_ff"),
        (["--shapes", "²x³"], "--shapes ²x³: expected d_model x d_ff"),
        (["--shapes", "8x32", "ffn=swiglu"], "KEY=VALUE goes before the options"),
        (["--densities", "0"], "expected numbers between 0 and 1"),
        (["act=gelu"], "GELU is not zero"),
        (["ffn=dynamic"], "Dynamic has no sparse form"),
        (["ffn=moe"], "MoE has no sparse form"),
    ],
)
def test_messages(capsys: pytest.CaptureFixture, arguments: list[str], words: str):
    assert main([*SMALL, *arguments]) == 1
    assert words in capsys.readouterr().err


def test_a_file_that_cannot_be_written_loses_nothing(capsys: pytest.CaptureFixture):
    assert main([*SMALL, "--densities", "0.1", "--csv", "/dev/null"]) == 1
    shown = capsys.readouterr()
    assert "one token forward" in shown.out
    assert "/dev/null is not a file: choose another name" in shown.err
