"""Every figure out of a run directory: complete, true to the record, at ease with odd runs."""

import math
import shutil
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import yaml
import zarr
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression
from scipy.stats import binom

from ffnlab.analysis.figures import Drawing, Missing, Options, entries
from ffnlab.analysis.figures.activity import binned, binomial
from ffnlab.analysis.figures.training import smoothed
from ffnlab.analysis.panels import apart, borders, spread
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import printable
from ffnlab.errors import UserError

NEED_NO_RECORD = {"sphere", "activation_vs_angle", "dot_products", "equator"}  # geometry, of the config alone
OURS = sorted(set(entries()) - NEED_NO_RECORD)


def draw(run: Run, name: str, **options) -> Drawing:
    """A figure that is drawn without a warning (of an empty slice, say)."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return entries()[name].draw(run, Options(**options))


def array(run: Run, name: str) -> np.ndarray:
    """An array of the record, read without the code under test."""
    return zarr.open_array(run.path / "neurons.zarr", path=name, mode="r")[...]


def lines(drawing: Drawing, panel: int = 0) -> dict[str, np.ndarray]:
    """The curves of a panel by their labels, (x, y)."""
    return {str(line.get_label()): line.get_xydata() for line in drawing.picture.axes[panel].get_lines()}


def bundles(drawing: Drawing, panel: int) -> list[np.ndarray]:
    collections = drawing.picture.axes[panel].collections
    return [np.array(c.get_segments()) for c in collections if isinstance(c, LineCollection)]


@pytest.mark.parametrize("name", OURS)
def test_a_figure_says_what_it_shows(recorded: Run, name: str):
    drawing = draw(recorded, name)
    picture = drawing.picture
    assert isinstance(picture, Figure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a missing glyph, or no room for a panel
        FigureCanvasAgg(picture).draw()
    assert printable(recorded.name) in picture.get_suptitle()
    assert drawing.caption.endswith(".")
    assert len(drawing.caption) > 60
    assert "nan" not in drawing.caption
    for axes in picture.axes:
        assert axes.get_ylabel()
        assert axes.get_xlabel() or axes.get_label() == "<colorbar>" or name == "gradients"  # shared below


def test_every_figure_of_the_list_says_what_to_record_for_it(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    for name in OURS:
        with pytest.raises(Missing, match=r"the run (holds|has) no") as caught:
            entries()[name].draw(Run(tmp_path), Options())
        assert caught.value.record
        assert caught.value.record in str(caught.value) or name == "loss"


@pytest.mark.parametrize(
    ("name", "key"), [("active_frac", "activity/*/active_frac"), ("threshold", "threshold/*/c")]
)
def test_curves_are_the_record(recorded: Run, name: str, key: str):
    drawn = lines(draw(recorded, name))
    assert list(drawn) == ["L00", "L01", "L02"]
    for layer, xy in drawn.items():
        metric = f"probe/{key.replace('*', layer)}"
        rows = [(row["step"], row[metric]) for row in recorded.rows if metric in row]
        np.testing.assert_array_equal(xy, rows)
    assert list(lines(draw(recorded, name, layers=("L01",)))) == ["L01"]


def test_losses_with_fewer_neurons_are_those_of_the_tables(recorded: Run):
    (drawn,) = (v for k, v in lines(draw(recorded, "sparsify"), 1).items() if k == "L01")
    np.testing.assert_allclose(drawn, [(0.4 * 0.5**i, 0.1 * i) for i in range(4)])
    bars = draw(recorded, "ablate").picture.axes[0].patches
    assert [bar.get_width() for bar in bars] == [0.5, 1.5, 2.5]  # type: ignore[attr-defined]
    assert "put out their mean over the scan." in draw(recorded, "ablate").caption


@pytest.mark.parametrize("low", [0.005, 0.06, 0.21])
def test_the_axis_of_active_fractions_can_be_read(make_run: Callable[..., Path], tmp_path: Path, low: float):
    """Whatever range the fractions span: no label touches another, and no point lies on the edge."""
    path = make_run(tmp_path / "run", layers=["L00"], neurons=4, tokens=4, steps=2)
    table = (path / "sparsify.csv").read_text().splitlines()
    rows = [f"{method},{layer},{x},{x},3,{rise},0" for layer in ("all", "L00") for method, x, rise in (
        ("none", 0.45, 0.0), ("c", (0.45 * low) ** 0.5, 0.1), ("c", low, 0.2)
    )]  # fmt: skip
    (path / "sparsify.csv").write_text("\n".join([table[0], *rows, ""]))
    picture = draw(Run(path), "sparsify").picture
    canvas = FigureCanvasAgg(picture)
    canvas.draw()
    for axes in picture.axes:
        shown = [text for text in axes.get_xticklabels(which="both") if text.get_text()]
        boxes = [text.get_window_extent() for text in shown]
        inside = [box for box in boxes if axes.bbox.x0 - 1 <= (box.x0 + box.x1) / 2 <= axes.bbox.x1 + 1]
        assert len(inside) >= 2
        assert not any(a.overlaps(b) for i, a in enumerate(inside) for b in inside[:i])
        left, right = axes.get_xlim()
        assert left < low
        assert right > 0.45


def test_loss_is_smoothed_over_finite_values():
    values = np.array([1.0, np.nan, 3.0, 5.0, np.inf])
    np.testing.assert_allclose(smoothed(values, 3), [1, 2, 4, 4, 5])
    assert np.isnan(smoothed(np.full(3, np.nan), 1)).all()


def test_histogram_counts_every_neuron_and_expects_a_binomial(recorded: Run):
    patches = draw(recorded, "active_frac_histogram").picture.axes[0].patches
    by_label = {p.get_label(): p.get_data() for p in patches}
    frac = array(recorded, "L00/activity/active_frac")
    steps = array(recorded, "L00/activity/step")
    for label in ("step 0", "step 60"):
        values, edges, _ = by_label[label]
        row = frac[steps == int(label.split()[1])][0]
        np.testing.assert_array_equal(values, [((row >= a) & (row < b)).sum() for a, b in pairwise(edges)])
        assert values.sum() == 48
    assert by_label["binomial, p = 1/2"][0].sum() == pytest.approx(48)
    p = binom.pmf(np.arange(129), 128, 0.5)
    np.testing.assert_allclose(binomial(128), p, rtol=1e-9)
    np.testing.assert_allclose(binned(p, 3), p.reshape(43, 3).sum(1))


def test_heatmap_shows_the_sorted_record(recorded: Run):
    image = draw(recorded, "heatmap", layers=("L02",)).picture.axes[0].get_images()[0]
    frac = array(recorded, "L02/activity/active_frac")
    shown = np.ma.getdata(image.get_array())
    np.testing.assert_array_equal(shown, np.array(sorted(frac.T, key=lambda row: row[-1])))
    assert (np.diff(shown[:, -1]) >= 0).all()
    np.testing.assert_array_equal(borders(np.array([0, 1, 3, 7])), [-0.5, 0.5, 2, 5, 9])


def test_sparsity_bars_add_up(recorded: Run):
    axes = draw(recorded, "sparsity_by_layer").picture.axes[0]
    heights = np.array([[bar.get_height() for bar in bars] for bars in axes.containers])
    np.testing.assert_allclose(heights.sum(0), 1)
    last = recorded.rows[-1]
    np.testing.assert_allclose(heights[2], [last[f"probe/activity/L0{i}/dead_frac"] for i in range(3)])
    diamonds = axes.get_lines()[0].get_ydata()
    np.testing.assert_allclose(diamonds, [last[f"probe/activity/L0{i}/active_frac"] for i in range(3)])


def test_the_neuron_followed_by_default_is_the_median_of_the_undecided(recorded: Run):
    final = array(recorded, "L00/activity/active_frac")[-1]
    some = sorted((f, i) for i, f in enumerate(final) if 0 < f < 1)
    index = some[len(some) // 2][1]
    drawing = draw(recorded, "neuron_trace")
    assert f"Neuron {index} of L00" in drawing.picture.get_suptitle()
    assert f"median, by active fraction ({final[index]:.2f} at step 60)" in drawing.caption
    assert len(lines(drawing)) == 11  # 10 tokens and C


def test_a_chosen_neuron_on_chosen_tokens(recorded: Run):
    drawing = draw(recorded, "neuron_trace", layers=("L02",), neuron=5, tokens=(3, 4))
    drawn = lines(drawing)
    assert set(drawn) == {"_c", r"' \$5' 3:3", r"'\u5b57' 0:4"}
    trace = array(recorded, "L02/trace/preact")
    np.testing.assert_array_equal(drawn[r"' \$5' 3:3"][:, 1], trace[:, 3, 5])
    c = {row["step"]: row["probe/threshold/L02/c"] for row in recorded.rows if "probe/threshold/L02/c" in row}
    assert {step: drawn["_c"][step, 1] for step in c} == pytest.approx(c)
    assert drawn["_c"][28, 1] == pytest.approx(0.4 * c[25] + 0.6 * c[30])  # between two looks
    with pytest.raises(UserError, match="--neuron 48: L00 has neurons 0 to 47"):
        draw(recorded, "token_lines", neuron=48)
    with pytest.raises(UserError, match="--token 32: the probe batch has tokens 0 to 31"):
        draw(recorded, "neuron_trace", tokens=(32,))
    with pytest.raises(Missing, match=r"of L01 nothing is recorded, only L00, L02"):
        draw(recorded, "neuron_trace", layers=("L01",))


def test_every_token_is_a_line(recorded: Run):
    drawing = draw(recorded, "token_lines", neuron=7)
    trace = array(recorded, "L02/trace/preact")[:, :, 7].T
    drawn = np.concatenate(bundles(drawing, 1))[..., 1]
    assert drawn.shape == (32, 61)
    assert sorted(map(tuple, drawn)) == sorted(map(tuple, trace))
    rows = [row for row in recorded.rows if "probe/threshold/L02/c" in row]
    at = np.array([row["step"] for row in rows])
    c = np.interp(np.arange(61), at, [row["probe/threshold/L02/c"] for row in rows])
    ever = (trace > c).any(axis=1).mean()
    assert f"{ever:.0%} of 32 tokens above C at least once" in drawing.caption.split("L02: ")[1]


def test_lineage_follows_the_extremes(recorded: Run):
    drawing = draw(recorded, "lineage")
    trace = array(recorded, "L00/trace/preact").reshape(61, -1).astype(np.float32)
    order = trace[-1].argsort(kind="stable")
    low, high = trace[:, order[:100]].T, trace[:, order[-100:]].T
    drawn = bundles(drawing, 0)
    np.testing.assert_array_equal(drawn[0][..., 1], low)
    np.testing.assert_array_equal(drawn[1][..., 1], high)
    assert f"P(start > 0 | highest) = {(high[:, 0] > 0).mean():.2f}" in drawing.caption
    assert f"P(start > 0 | lowest) = {(low[:, 0] > 0).mean():.2f}" in drawing.caption
    assert drawing.caption.endswith(f"{np.std(high[:, -1]) / np.std(low[:, -1]):.2f}.")


def test_norms_and_crossings_are_the_record(recorded: Run):
    norms = array(recorded, "L00/weights/up_norm")
    drawing = draw(recorded, "up_norms")
    np.testing.assert_allclose(bundles(drawing, 0)[0][..., 1], norms.T)
    assert f"L00 {np.median(norms[0]):.3f} to {np.median(norms[-1]):.3f} (48 neurons)" in drawing.caption
    ever = array(recorded, "L01/crossings/ever_active_frac")[-1].mean()
    assert f"L01 {ever:.1%}" in draw(recorded, "crossings").caption


def test_norms_of_gates_have_their_own_panels(make_run: Callable[..., Path], tmp_path: Path):
    run = Run(make_run(tmp_path / "run", layers=["L00"], neurons=4, tokens=4, steps=2))
    group = zarr.open_group(run.path / "neurons.zarr", path="L00/weights", mode="a")
    norms = 3 * array(run, "L00/weights/up_norm")
    group.create_array("gate_norm", data=norms, dimension_names=("step", "neuron"))
    drawing = draw(run, "up_norms")
    assert [axes.get_title(loc="left") for axes in drawing.picture.axes] == ["L00 up", "L00 gate"]
    np.testing.assert_allclose(bundles(drawing, 1)[0][..., 1], norms.T)
    assert f"L00 gate {np.median(norms[0]):.3f}" in drawing.caption


def test_moving_distribution(recorded: Run, tmp_path: Path):
    drawing = draw(recorded, "preact_animation")
    hist, steps = array(recorded, "L00/preact/hist"), array(recorded, "L00/preact/step")
    filled = drawing.picture.axes[0].patches[1]
    for i in (0, len(steps) - 1):
        drawing.frames[i]()
        expected = hist[i, 1:-1] / hist[i].sum() / 0.1  # bins of width 0.1, the open ones without a density
        np.testing.assert_allclose(filled.get_data().values, expected, rtol=1e-5)
        assert drawing.picture.axes[0].texts[0].get_text().startswith(f"step {steps[i]}\nmean ")
    without = shutil.copytree(recorded.path, tmp_path / "run")
    shutil.rmtree(without / "neurons.zarr" / "preact")
    drawing = draw(Run(without), "preact_animation")  # out of the trace
    (values, edges, _) = drawing.picture.axes[0].patches[1].get_data()
    trace = array(recorded, "L00/trace/preact")[-1].ravel().astype(float)
    inside = ((trace >= edges[0]) & (trace <= edges[-1])).mean()
    assert (values * np.diff(edges)).sum() == pytest.approx(inside)


def test_top_tokens_stand_in_their_context(recorded: Run):
    drawing = draw(recorded, "top_tokens", neuron=3)
    place = int(array(recorded, "L00/top_tokens/position")[-1, 3, 0])
    scan = array(recorded, "scan/token").ravel()
    shown = [text.get_text() for text in drawing.picture.axes[0].texts]
    assert len(shown) == 3 * 3 * 4  # scans, parts of a cell, ranks
    value, before, token = shown[-12:-9]
    assert value == f"{float(array(recorded, 'L00/top_tokens/value')[-1, 3, 0]):.2f}"
    words = {i: recorded.texts.get(i, f" #{i}") for i in range(12)}
    assert token.strip("'\"") == printable(words[int(scan[place])]) or token == f"#{scan[place]}"
    if place % 16:
        assert before.endswith(printable(words[int(scan[place - 1])]))


# ---- odd runs


def one_step(path: Path, make_run: Callable[..., Path]) -> Path:
    make_run(path, layers=["L00"], neurons=8, tokens=8, steps=0)
    (path / "tokens.json").unlink()
    shutil.rmtree(path / "neurons.zarr" / "probe_batch")
    return path


def experts(path: Path, make_run: Callable[..., Path]) -> Path:
    make_run(path, layers=["L00", "L03_extra"], neurons=8, tokens=8, steps=6, experts=True)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')
    root = zarr.open_group(path / "neurons.zarr")
    for name in ("activity/active_frac", "trace/preact"):  # as a kill within an append leaves it
        grown = root[f"L00/{name}"]
        grown.resize((grown.shape[0] + 1, *grown.shape[1:]))
    steps = root["L00/preact/step"]
    for part in ("step", "mean", "sd", "hist"):
        root[f"L00/preact/{part}"].resize((steps.shape[0] + 1, *root[f"L00/preact/{part}"].shape[1:]))
    return path


def diverged(path: Path, make_run: Callable[..., Path]) -> Path:
    make_run(path, layers=["L00", "L01"], neurons=8, tokens=8, steps=6)
    root = zarr.open_group(path / "neurons.zarr")
    for name, part in root.members(max_depth=None):
        if isinstance(part, zarr.Array) and part.dtype.kind == "f" and name.startswith("L"):
            part[-1] = np.nan
    lines = (path / "metrics.jsonl").read_text().splitlines()
    head, *rest = lines[-1][1:-1].split(", ")
    spoilt = [f'{pair.split(": ")[0]}: null, {pair.split(": ")[0][:-1]}/nonfinite": "nan"' for pair in rest]
    lines[-1] = "{" + ", ".join([head, *spoilt]) + "}"
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("odd", [one_step, experts, diverged])
def test_odd_runs_are_drawn(tmp_path: Path, make_run: Callable[..., Path], odd: Callable[..., Path]):
    run = Run(odd(tmp_path / "run", make_run))
    assert run.rows[-1]["step"] in (0, 6)
    drawn = 0
    for name in OURS:
        try:
            draw(run, name)
            drawn += 1
        except Missing:
            continue
    assert drawn >= 17


def test_a_group_that_is_being_written_is_read_as_far_as_it_is_whole(
    tmp_path: Path, make_run: Callable[..., Path]
):
    run = Run(experts(tmp_path / "run", make_run))
    assert run.neurons("L00/preact").step.values.tolist() == [0, 1, 2, 3, 4, 5, 6]
    data = run.neurons("L00/trace")
    assert isinstance(data, xr.Dataset)
    assert data.sizes["step"] == 7
    np.testing.assert_array_equal(data.preact, array(run, "L00/trace/preact")[:7])


def test_a_neurons_own_threshold_is_drawn(tmp_path: Path, make_run: Callable[..., Path]):
    path = make_run(tmp_path / "run", layers=["L00"], neurons=8, tokens=8, steps=4)
    root = zarr.open_group(path / "neurons.zarr")
    own = np.arange(8, dtype=np.float32)[None] + np.zeros((2, 1), dtype=np.float32)
    root.create_array("L00/threshold/c", data=own, dimension_names=("step", "neuron"))
    root.create_array("L00/threshold/step", data=np.array([0, 3]), dimension_names=("step",))
    assert set(lines(draw(Run(path), "neuron_trace", neuron=6))["_c"][:, 1]) == {6.0}


# ---- what figures are made of


def test_labels_move_as_little_as_they_must():
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 12):
        heights = np.sort(rng.uniform(0.2, 0.8, n))
        gap = 0.04
        moved = apart(heights, gap)
        offset = gap * np.arange(n)
        np.testing.assert_allclose(moved, isotonic_regression(heights - offset).x + offset)
    crowded = apart(np.ones(5), 0.1)
    np.testing.assert_allclose(crowded, [0.6, 0.7, 0.8, 0.9, 1.0])


def test_spread_keeps_both_ends():
    assert spread(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert spread(1, 10).tolist() == [0]
    assert spread(100, 3).tolist() == [0, 50, 99]


def test_text_that_a_font_lacks_is_written_out():
    assert printable("a\n\x00$字🙂") == r"a\n\x00\$\u5b57\U0001f642"
    assert printable("é € ∂ ½") == "é € ∂ ½"
    assert printable("\ud800") == "\\ud800"
    assert printable("x" * 20, 5) == "xxxx…"


def test_layers_are_told_apart_in_grey(recorded: Run):
    colours = [line.get_color() for line in draw(recorded, "active_frac").picture.axes[0].get_lines()]
    grey = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b, _ in colours]
    assert np.diff(grey).min() > 0.15
    assert math.isclose(max(grey), grey[-1])
    assert yaml.safe_load((recorded.path / "config.yaml").read_text()) == recorded.config
