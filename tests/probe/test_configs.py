"""The probe group of the configuration."""

import pytest

from ffnlab import build
from ffnlab.config import compose
from ffnlab.errors import UserError
from ffnlab.probe.activity import Activity
from ffnlab.probe.gates import Gates
from ffnlab.probe.preact import Preact
from ffnlab.probe.routing import Routing
from ffnlab.probe.threshold import Threshold

DEFAULT = {
    "activity": Activity,
    "preact": Preact,
    "threshold": Threshold,
    "gates": Gates,
    "routing": Routing,
}


def probes(*overrides: str):
    return build.probes(compose(overrides)[0])


def kinds(*overrides: str) -> dict[str, type]:
    return {name: type(probe) for name, probe in probes(*overrides).items()}


def test_choices_replace_and_lists_add(tmp_path):
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "mine.yaml").write_text(
        "mine:\n  _target_: ffnlab.probe.gates.Gates\n  every: ${probe.every}\n"
    )
    search = f"hydra.searchpath=[file://{tmp_path}]"
    assert kinds() == DEFAULT
    assert kinds(search, "probe=[default,mine]", "probe.every=3") == {**DEFAULT, "mine": Gates}
    assert probes(search, "probe=mine", "probe.every=3")["mine"].every == 3
    assert kinds("probe=[preact,gates]") == {"preact": Preact, "gates": Gates}
    assert kinds("probe=[]") == {}


def test_every_is_shared_unless_a_probe_has_its_own():
    found = probes("probe.every=7", "probe.preact.every=2")
    assert {name: probe.every for name, probe in found.items()} == {
        "activity": 7,
        "preact": 2,
        "threshold": 7,
        "gates": 7,
        "routing": 7,
    }


def test_settings_are_the_other_keys():
    settings = build.probe_settings(compose(["probe.schedule=log", "probe.tokens=64"])[0])
    assert (settings.schedule, settings.tokens, settings.every) == ("log", 64, 10)


@pytest.mark.parametrize(
    "bad", ["probe.schedule=often", "probe.every=0", "probe.tokens=1.5", "probe.budget_gib=0"]
)
def test_bad_settings_are_told(bad):
    with pytest.raises(UserError, match=bad.split("=")[0].replace(".", r"\.")):
        build.probe_settings(compose([bad])[0])


@pytest.mark.parametrize("bad", ["probe.activity.bins=0", "probe.preact.every=0", "+probe.gates.wide=1"])
def test_bad_options_are_told(bad):
    with pytest.raises(UserError, match=bad.split("=")[0].lstrip("+").replace(".", r"\.")):
        probes(bad)
