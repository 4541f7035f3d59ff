"""The report of a run whose every text is hostile: complete, escaped, and alive in a browser."""

import base64
import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
import zarr

from ffnlab.analysis.figures import entries
from ffnlab.analysis.report import report
from ffnlab.analysis.report.explorer import packed, spread
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import seen
from ffnlab.errors import UserError
from ffnlab.record.metrics import Metrics
from ffnlab.record.neurons import NeuronRecord

HOSTILE = "</script><script>document.title='owned'</script><img src=http://x.invalid/ onerror=alert(1)>"
STEPS, NEURONS, TOKENS = 11, 6, 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("report") / "<b>run&"
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump({"seed": 0, "out": HOSTILE}))
    (path / "run.json").write_text(json.dumps({"status": "done", "command": [HOSTILE], "parameters": 12345}))
    metrics = Metrics(path / "metrics.jsonl")
    for step in range(STEPS):
        scalars = {f"probe/activity/L{i:02d}/active_frac": 0.5 - 0.01 * step * (i + 1) for i in range(2)}
        metrics.append({"step": step, "train/loss": 3.0 - 0.1 * step, **scalars})
    metrics.close()
    record = NeuronRecord(path / "neurons.zarr", 1.0)
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        for label in ("L00", "L01"):
            active = np.linspace(0, 1, NEURONS, dtype=np.float32) * (1 - step / 20)
            record.add(step, f"{label}/activity/active_frac", active, ("neuron",))
        trace = rng.normal(size=(TOKENS, NEURONS)).astype(np.float16)
        record.add(step, "L01/trace/preact", trace, ("token", "neuron"))
    top = np.stack([rng.permutation(20)[:3] for _ in range(NEURONS)]).astype(np.int32)
    record.add(STEPS - 1, "L01/top_tokens/position", top, ("neuron", "rank"))
    record.add(STEPS - 1, "L01/top_tokens/value", top.astype(np.float16), ("neuron", "rank"))
    record.flush()
    root = zarr.open_group(path / "neurons.zarr", mode="a")
    for name, values, dims in (
        ("probe_batch/token", np.arange(TOKENS, dtype=np.int32), ("token",)),
        ("probe_batch/window", np.zeros(TOKENS, dtype=np.int32), ("token",)),
        ("probe_batch/position", np.arange(TOKENS, dtype=np.int32), ("token",)),
        ("scan/token", np.arange(20, dtype=np.int32).reshape(2, 10), ("window", "position")),
    ):
        root.create_array(name, data=values, dimension_names=dims)
    texts = {str(i): f" w{i}" for i in range(20)} | {"3": HOSTILE, "4": "\n字\x00\u202e"}
    (path / "tokens.json").write_text(json.dumps({"seq_len": 10, "text": texts}))
    return Run(path)


@pytest.fixture(scope="module")
def page(run: Run) -> str:
    return report([run, run])


def explorer_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="run0-data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_no_text_of_a_run_becomes_markup_or_a_link(page: str):
    assert HOSTILE not in page
    assert "<b>run&" not in page
    assert html.escape("<b>run&") in page
    assert len(re.findall(r"<script\b", page)) == 3  # two of data, one of ours
    assert "default-src 'none'" in page
    assert not re.search(r'(?:src|href)="(?!data:image/png;base64,|#run)', page)


def test_the_table_holds_the_last_values(page: str):
    rows = re.findall(r"<tr><td>(L\d\d)</td><td>([\d.]+%)</td>", page)
    assert rows[:2] == [("L00", "40.0%"), ("L01", "30.0%")]
    assert "12,345" in page


def test_the_explorer_holds_the_record(page: str, run: Run):
    layers = explorer_data(page)["layers"]
    assert set(layers) == {"L00", "L01"}
    active = layers["L00"]["active"]
    codes = np.frombuffer(base64.b64decode(active["data"]), np.uint8).reshape(active["shape"])
    truth = run.neurons("L00/activity")["active_frac"].values
    assert np.abs(codes / 254 - truth).max() <= 0.5 / 254 + 1e-6
    assert active["steps"] == list(range(STEPS))
    trace = layers["L01"]["trace"]
    assert trace["shape"] == [STEPS, TOKENS, NEURONS]
    assert trace["tokens"][3] == HOSTILE  # as data, not as markup
    assert trace["tokens"][4] == r"\n字\x00\u202e"  # what cannot be seen, seen
    codes = np.frombuffer(base64.b64decode(trace["data"]), np.uint8).reshape(trace["shape"])
    low, high = np.array(trace["low"]), np.array(trace["high"])
    truth = run.neurons("L01/trace")["preact"].values[..., trace["neurons"]].astype(float)
    assert np.abs(low + codes / 254 * (high - low) - truth).max() <= (high - low).max() / 254
    np.testing.assert_allclose(low, truth.min((0, 1)))  # each neuron has a range of its own
    top = layers["L01"]["top"]
    first = top["position"][0][0]
    assert top["context"][str(first)][1] == seen(run.texts[first])
    assert top["step"] == STEPS - 1


def test_figures_come_in_reading_order_and_what_went_wrong_first(page: str, run: Run, tmp_path: Path):
    names = re.findall(r"<figcaption><strong>(\w+)</strong>", page)
    assert names[: len(names) // 2][:2] == ["loss", "active_frac"]
    order = list(entries())
    assert order.index("loss") < order.index("heatmap") < order.index("ablate") < order.index("sphere")
    assert 'class="problem"' not in page
    lost = tmp_path / "lost"
    lost.mkdir()
    (lost / "config.yaml").write_text("seed: 0\n")
    (lost / "run.json").write_text('{"status": "diverged", "diverged": "step 7: the loss is nan"}')
    assert '<p class="problem">diverged (step 7: the loss is nan)</p>' in report([Run(lost)], [])


def test_a_run_without_records_has_a_report(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    page = report([Run(tmp_path)])
    assert "explorer" not in re.sub(r"<s(tyle|cript)>.*?</s\1>", "", page, flags=re.DOTALL)


def test_values_that_are_not_finite_and_places_that_are_few():
    codes = np.frombuffer(
        base64.b64decode(packed(np.array([0, np.nan, 1.0, np.inf]), 0, 1)["data"]), np.uint8
    )
    assert codes.tolist() == [0, 255, 254, 255]
    assert spread(1, 64).tolist() == [0]
    assert spread(0, 64).size == 0
    places = spread(1000, 64)
    assert (places[0], places[-1], len(places)) == (0, 999, 64)


def test_a_damaged_record_is_said_and_not_a_bug(run: Run, tmp_path: Path):
    texts = tmp_path / "texts"
    shutil.copytree(run.path, texts)
    (texts / "tokens.json").write_text('{"text": "x"}')
    with pytest.raises(UserError, match="does not hold the texts"):
        report([Run(texts)], [])
    chunks = tmp_path / "chunks"
    shutil.copytree(run.path, chunks)
    for chunk in (chunks / "neurons.zarr/L00/activity/active_frac/c").rglob("*"):
        if chunk.is_file():
            chunk.write_bytes(chunk.read_bytes()[:5])
    with pytest.raises(UserError, match="ffnlab verify"):
        report([Run(chunks)], [])


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")), reason="no Chromium on this machine"
)
def test_it_lives_in_a_browser(page: str, tmp_path: Path):
    from selenium import webdriver
    from selenium.webdriver.common.by import By

    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as browser:
        browser.get(file.as_uri())
        assert "owned" not in browser.title
        form = browser.find_element(By.CSS_SELECTOR, "form.explorer")
        assert f"neuron 0 of {NEURONS}" in form.find_element(By.CLASS_NAME, "note").text
        form.find_element(By.NAME, "layer").send_keys("L01")
        form.find_element(By.NAME, "next").click()
        assert f"neuron 1 of {NEURONS}" in form.find_element(By.CLASS_NAME, "note").text
        assert len(form.find_elements(By.CSS_SELECTOR, "path.active")) == 1
        assert len(form.find_elements(By.CSS_SELECTOR, "path.token")) == TOKENS
        assert len(form.find_elements(By.CSS_SELECTOR, ".top tbody tr")) == 3
        assert "post-activation" in form.find_element(By.CSS_SELECTOR, ".top thead").text
        pictures = browser.find_elements(By.TAG_NAME, "img")
        assert all(browser.execute_script("return arguments[0].naturalWidth > 0", img) for img in pictures)
        severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert not severe, severe
