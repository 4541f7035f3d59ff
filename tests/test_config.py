"""What a configuration may not do."""

import pytest

from ffnlab import build
from ffnlab.config import as_float, fits, locate
from ffnlab.errors import UserError
from ffnlab.validate import validate


@pytest.mark.parametrize(
    "overrides",
    [
        ["study=${oc.env:HOME}"],
        ["study=env", "arm='${oc.${study}:HOME}'"],
        ["study=oc.env", "arm='${${study}:HOME}'"],
    ],
)
def test_resolvers_are_refused_also_when_they_are_put_together(overrides: list[str]):
    with pytest.raises(UserError, match="only references"):
        build.compose(overrides)


def test_plugins_come_from_the_command_line_only(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/evil.yaml").write_text("# @package _global_\nplugins: [os]\n")
    with pytest.raises(UserError, match="comes from a file"):
        build.compose(["experiment=evil", f"hydra.searchpath=[file://{tmp_path}]"])
    assert build.compose(["plugins=[my_pkg]"])[0]["plugins"] == ["my_pkg"]


@pytest.mark.parametrize(
    "target",
    ["os.system", "ffnlab.nn.gpt.torch.load", "ffnlab.nn.gpt.nn", "ffnlab.nn.head.F", "ffnlab.missing.X"],
)
def test_targets_are_classes_of_their_own_module(target: str):
    with pytest.raises(UserError, match="_target_"):
        locate(target)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.value_embeddings=[[1],[1]]"], "two tables"),
        (["model.value_embeddings=[[1]]", "model.drop_attn=[1]"], "has no attention"),
        (["optim=sgd", "optim.nesterov=true", "optim.momentum=0"], "nesterov"),
        (["attention.scale=-1"], "attention.scale"),
        (["optim.lr=0"], "optim.lr"),
        (["schedule.warmup_frac=0.7", "schedule.decay_frac=0.7"], "at most 1"),
        (["model.drop_attn=[0,1,2,3,4,5]", "model.drop_ffn=[0,1,2,3,4,5]"], "leave no sublayer"),
        (["model.n_heads=3", "train.steps=-1", "optim.lr=nan"], "does not divide"),
    ],
)
def test_what_does_not_fit_is_said(overrides: list[str], said: str):
    with pytest.raises(UserError, match=said):
        validate(build.compose(overrides)[0])


def test_integers_become_floats_where_floats_are_asked():
    assert as_float(4, float) == 4.0
    assert isinstance(as_float(4, float | None), float)
    assert [type(x) for x in as_float([1, 2.5], list[float] | None)] == [float, float]
    assert type(as_float(4, int | float)) is int
    assert as_float(True, bool) is True
    assert not fits(True, float)
    assert not fits(float("nan"), float)
