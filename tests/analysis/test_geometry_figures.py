"""Figures of the geometry, drawn from runs that hold a configuration and few metrics."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from scipy import stats

from ffnlab.analysis.figures import Missing, Options, entries
from ffnlab.analysis.runs import Run
from ffnlab.errors import UserError

NAMES = ("sphere", "activation_vs_angle", "dot_products", "equator")
RELU2 = {"_target_": "ffnlab.nn.act.relu.ReLU2"}
Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A run directory as training leaves it, with what these figures read."""

    def make(rows: list[dict[str, float]] | None = None, **config: Any) -> Run:
        parts = {
            "model": {"d_model": 64, "init": "uniform"},
            "ffn": {"_target_": "ffnlab.nn.ffn.mlp.MLP", "expansion": 4.0, "d_ff": None},
            "act": RELU2,
            "threshold": {"_target_": "ffnlab.nn.threshold.NoThreshold"},
            "norm_ffn": {"_target_": "ffnlab.nn.norm.RMSNorm"},
        }
        path = tmp_path / "relu2-s0"
        path.mkdir()
        (path / "config.yaml").write_text(yaml.safe_dump(parts | config))
        lines = [json.dumps(row) + "\n" for row in rows or []]
        (path / "metrics.jsonl").write_text("".join(lines))
        return Run(path)

    return make


def draw(name: str, run: Run, options: Options | None = None) -> tuple[Figure, str]:
    drawing = entries()[name].draw(run, options or Options())
    assert isinstance(drawing.picture, Figure)
    return drawing.picture, drawing.caption


def threshold_heights(picture: Figure) -> list[float]:
    lines = [line for axes in picture.axes for line in axes.get_lines() if line.get_gid() == "threshold"]
    return [float(np.asarray(line.get_ydata())[0]) for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_is_enough_and_everything_is_labelled(name: str, make: Make, tmp_path: Path) -> None:
    picture, caption = draw(name, make())
    assert picture.get_suptitle().endswith("\nrelu2-s0")
    assert all(axes.get_xlabel() for axes in picture.axes)
    assert picture.axes[0].get_ylabel()
    assert len(caption) > 100
    assert caption.endswith(".")
    picture.savefig(tmp_path / "picture.png", dpi=50)  # nothing fails only when it is drawn


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_is_no_run_of_ours_is_not_drawn(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0")
    with pytest.raises(Missing, match=r"has no .*model"):
        draw(name, Run(tmp_path))


def test_the_threshold_line_is_the_run_s_last_c_and_spread(make: Make) -> None:
    rows = [
        {"step": 0, "probe/threshold/L00/c": 0.0, "probe/preact/L00/sd": 0.5},
        {"step": 9, "probe/threshold/L00/c": 0.2, "probe/preact/L00/sd": 0.6},
        {"step": 9, "probe/threshold/L01/c": 0.4, "probe/preact/L01/sd": 1.0},
    ]
    run = make(rows)
    picture, caption = draw("sphere", run)
    expected = [0.3 / (0.8 * math.sqrt(d)) for d in (2, 64)]
    assert threshold_heights(picture) == pytest.approx(expected)
    assert "C = 0.3 as recorded last" in caption
    assert "s = 0.8 as recorded last" in caption
    titles = [axes.get_title(loc="left") for axes in picture.axes]
    exact = stats.beta(31.5, 31.5, loc=-1, scale=2).sf(expected[1])
    assert titles[1] == f"D = 64: {100 * exact:.3g} % of inputs above C"
    drawn = [np.asarray(points.get_offsets()) for axes in picture.axes for points in axes.collections
             if len(points.get_offsets()) == 40]  # fmt: skip
    filled = [float((z[:, 1] > h).mean()) for z, h in zip(drawn, expected, strict=True)]
    assert filled == pytest.approx([stats.beta(0.5, 0.5, loc=-1, scale=2).sf(expected[0]), exact], abs=0.025)
    picture, _ = draw("sphere", run, Options(layers=("L01",)))
    assert threshold_heights(picture)[0] == pytest.approx(0.4 / math.sqrt(2))


def test_c_before_the_first_record_is_the_configured_one(make: Make) -> None:
    picture, caption = draw("sphere", make(threshold={"init": 0.0, "active_frac": 0.3}))
    assert threshold_heights(picture)[1] == pytest.approx(0.262 / (0.5 * 8), abs=2e-4)
    assert "as configured" in caption
    assert "s = 0.5 before training" in caption


def test_activation_and_c_as_asked_for(make: Make) -> None:
    run = make()
    picture, caption = draw("sphere", run, Options(act="gelu", c=-0.25))
    assert threshold_heights(picture)[0] == pytest.approx(-0.25 / (0.5 * math.sqrt(2)))
    assert "gelu(pre-activation - C)" in caption
    picture, _ = draw("sphere", run, Options(c=9.0))
    assert threshold_heights(picture) == []
    assert "C lies above the sphere" in {text.get_text() for axes in picture.axes for text in axes.texts}
    with pytest.raises(UserError, match="Did you mean 'gelu'"):
        draw("sphere", run, Options(act="gelo"))


def test_a_neuron_without_a_curve_is_missing_unless_another_is_asked_for(make: Make) -> None:
    run = make(act={"_target_": "ffnlab.nn.act.competing.TopK", "active_frac": 0.1})
    for name in ("sphere", "activation_vs_angle"):
        with pytest.raises(Missing, match="--act"):
            draw(name, run)
    assert threshold_heights(draw("sphere", run, Options(act="relu"))[0]) == [0, 0]


@pytest.mark.parametrize("act", ["relu2", "gelu"])
def test_curves_against_the_angle(act: str, make: Make) -> None:
    picture, caption = draw("activation_vs_angle", make(), Options(act=act, c=0.5))
    output, gradient = (
        {str(line.get_label()): np.asarray(line.get_data()) for line in axes.get_lines()}
        for axes in picture.axes[:2]
    )
    degrees, relu = output["relu"]
    np.testing.assert_allclose(relu, np.maximum(np.sin(np.radians(degrees)), 0), atol=1e-12)
    _, relu2 = output["relu2, or a relu gate tied to up"]
    np.testing.assert_allclose(relu2, np.maximum(np.sin(np.radians(degrees)), 0) ** 2, atol=1e-12)
    pre = 0.5 * 8 * np.sin(np.radians(degrees)) - 0.5
    own = {"relu2": np.maximum(pre, 0) ** 2, "gelu": pre * stats.norm.cdf(pre)}[act]
    label = f"as asked for: {act}, C = 0.5"
    np.testing.assert_allclose(output[label][1], own / np.abs(own).max(), atol=1e-12)
    for name, (_, y) in output.items():  # the right panel is the derivative of the left one
        if len(y) > 2:
            numeric = np.gradient(y, np.radians(degrees))
            middle = np.abs(gradient[name][1] - numeric)[2:-2]
            assert np.quantile(middle, 0.98) < 2e-3, name  # but for the step next to a kink
    marks = [text.get_text() for text in picture.axes[0].texts]
    assert marks == ["A", "B"]
    assert "A: at right angles (90 degrees)" in caption
    within = 1 - stats.beta(0.5, 31.5).sf(math.sin(math.radians(10)) ** 2)
    assert f"{100 * within:.6g} % for D = 64" in caption


def test_a_gated_run_shows_its_own_gate(make: Make) -> None:
    ffn = {"_target_": "ffnlab.nn.ffn.geglu.GEGLU", "expansion": 4.0}
    run = make(ffn=ffn, act={"_target_": "ffnlab.nn.act.gelu.GELU"})
    picture, _ = draw("activation_vs_angle", run)
    labels = [str(line.get_label()) for line in picture.axes[0].get_lines()]
    assert labels[2:4] == [
        "this run, gelu gate, C = 0: limit of up at right angles to it",
        "this run, gelu gate, C = 0: limit of up tied to it",
    ]
    assert "up projection" in draw("sphere", run)[1]


def test_the_sample_of_dot_products_lies_on_the_exact_density(make: Make) -> None:
    picture, _ = draw("dot_products", make())
    for axes, d in zip(picture.axes, (10, 64, 768), strict=True):
        assert axes.get_title(loc="left").startswith(f"D = {d}")
        reference = stats.beta((d - 1) / 2, (d - 1) / 2, loc=-1, scale=2)
        heights = np.array([bar.get_height() for bar in axes.patches])
        left = np.array([bar.get_x() for bar in axes.patches])
        right = left + np.array([bar.get_width() for bar in axes.patches])
        counts = heights * (right - left) * 10_000
        expected = 10_000 * (reference.cdf(right) - reference.cdf(left))
        enough = expected > 10
        chi2 = ((counts - expected) ** 2 / expected)[enough].sum()
        assert stats.chi2(enough.sum()).sf(chi2) > 0.001
        z, density = np.asarray(axes.get_lines()[0].get_data())
        np.testing.assert_allclose(density, reference.pdf(z), rtol=1e-6, atol=1e-12)


def test_the_equator_says_where_inputs_start(make: Make) -> None:
    run = make(norm_ffn={"_target_": "ffnlab.nn.norm.NoNorm"})
    picture, caption = draw("equator", run)
    assert "own inputs lie on no sphere" in caption
    for axes, d in zip(picture.axes, (2, 10, 64, 768), strict=True):
        shares, edges, _ = axes.patches[0].get_data()
        assert shares.sum() == pytest.approx(100)
        reference = stats.beta((d - 1) / 2, (d - 1) / 2, loc=-1, scale=2)
        np.testing.assert_allclose(shares, 100 * np.diff(reference.cdf(np.sin(np.radians(edges)))), atol=1e-9)
        sd = float(np.asarray(axes.get_lines()[1].get_xdata())[0])
        assert 0.5 * math.sqrt(d) * math.sin(math.radians(sd)) == pytest.approx(0.5)
    assert "99.9999 % within 10°" in picture.axes[3].get_title(loc="left")
