"""The report of a run whose every text is markup: none of it becomes an element, and nothing is loaded."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from ffnlab.analysis.report import report
from ffnlab.analysis.runs import Run
from ffnlab.record.neurons import NeuronRecord

NASTY = (
    "\"'><img src=https://x.invalid/i onerror=pwn()><script src=//x.invalid/s>pwn()</script><pwn-tag pwn=1>"
)
OURS = {"html", "head", "meta", "title", "style", "body", "main", "section", "h1", "h2", "p", "table", "tr"}
OURS |= {"th", "td", "thead", "tbody", "form", "label", "select", "input", "button", "span", "figure", "div"}
OURS |= {"figcaption", "script", "img", "strong", "details", "summary", "pre", "ul", "li", "a"}
LOADING = {"src", "href", "srcset", "action", "data", "poster", "formaction", "background", "style", "srcdoc"}


class Elements(HTMLParser):
    """Every element with its attributes, and the content of scripts and styles."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def nasty(node: Any, keep: tuple[str, ...] = ()) -> Any:
    """Every text in plain values made nasty, and a nasty key beside the others."""
    if isinstance(node, dict):
        spoilt = {key: value if key in keep else nasty(value) for key, value in node.items()}
        return {**spoilt, NASTY: NASTY}
    if isinstance(node, list):
        return [*map(nasty, node), NASTY]
    return NASTY if isinstance(node, str) else node


@pytest.fixture
def page(copied: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> str:
    path = copied().rename(copied().parent / "<b onload=pwn()>run")
    cfg = yaml.safe_load((path / "config.yaml").read_text())
    told = {k: v for k, v in cfg.items() if "_target_" not in str(v) and k != "plugins"}  # those are refused
    (path / "config.yaml").write_text(yaml.safe_dump(nasty(told)))
    info = json.loads((path / "run.json").read_text()) | {"git": {"commit": "c" * 40}, "command": ["x"]}
    info |= {"versions": {"ffnlab": "1"}, "device": {"name": "x"}, "precision": "x", "created": "x"}
    info |= {"diverged": "x", "threads": 1, "choices": {"ffn": "mlp", "act": "relu", "arch": "x"}}
    (path / "run.json").write_text(json.dumps(nasty(info, keep=("id",)) | {"status": "diverged"}))
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, NASTY: 1.0, f"probe/activity/{NASTY}/active_frac": 0.5}) + "\n")
    (path / "tokens.json").write_text(json.dumps({"seq_len": 16, "text": dict.fromkeys("01234567", NASTY)}))
    import numpy as np

    record = NeuronRecord(path / "neurons.zarr", 1.0)
    record.fix("probe_batch/token", np.arange(4, dtype=np.int32), ("token",))
    record.fix("scan/token", np.zeros((2, 4), dtype=np.int32), ("window", "position"))
    for step in (3, 4):
        record.add(step, "L00/trace/preact", np.zeros((4, 4), np.float16), ("token", "neuron"))
    record.add(4, "L00/top_tokens/position", np.zeros((4, 2), np.int32), ("neuron", "rank"))
    record.add(4, "L00/top_tokens/value", np.zeros((4, 2), np.float16), ("neuron", "rank"))
    record.flush()
    run = Run(path)
    return report([run, run], ["active_frac"])


def test_no_text_of_a_run_becomes_an_element_or_loads_anything(page: str):
    assert page.count("x.invalid") > 20  # the texts are there, and as text
    elements = Elements(page)
    assert {tag for tag, _ in elements.found} <= OURS
    for tag, attributes in elements.found:
        assert not any(name.startswith("on") or "pwn" in name for name in attributes), (tag, attributes)
        for name in LOADING & attributes.keys():
            value = attributes[name] or ""
            assert value.startswith(("data:image/png;base64,", "#run")), (tag, name, value[:80])
    scripts = [attributes for tag, attributes in elements.found if tag == "script"]
    assert [a.get("type") for a in scripts] == ["application/json", "application/json", None]


def test_the_policy_of_the_page_forbids_to_load(page: str):
    (policy,) = [
        a["content"] for tag, a in Elements(page).found if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy and "*" not in policy and "unsafe-eval" not in policy  # noqa: PT018


def test_no_file_of_ours_writes_html_elsewhere(root: Path):
    """The report is the one page: another must be tested here, too."""
    pages = [str(p.relative_to(root)) for p in root.glob("src/**/*.html")]
    assert pages == ["src/ffnlab/analysis/report/page.html"]
    safe = [line for line in (root / pages[0]).read_text().splitlines() if "| safe" in line]
    assert len(safe) == 2  # our own style and script
    script = (root / "src/ffnlab/analysis/report/explorer.js").read_text()
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "fetch(",
        "import(",
    ):
        assert way not in script
