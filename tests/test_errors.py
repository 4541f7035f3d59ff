"""Bad input: every problem of a command line at once, one line each; exit 1 or 2, no traceback."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from ffnlab.config import plain
from ffnlab.errors import UserError, closest, nearest, report, unknown
from ffnlab.explain import config_loader, explain
from ffnlab.validate import validate

Explain = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def problems(root: Path) -> Explain:
    """A command line as typed -> its problems, by the real configs."""
    loader = config_loader(root / "configs")
    return lambda line: explain(shlex.split(line), loader, lambda cfg: validate(plain(cfg)))


def train(*arguments: str, cwd: Path, root: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / "train.py"), *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_user_error_keeps_its_problems_apart():
    error = UserError("a", "b")
    assert error.problems == ["a", "b"]
    assert str(error) == "a\nb"
    assert isinstance(error, ValueError)


def test_nearest_names():
    assert closest("SwiGLU", ["mlp", "swiglu"]) == "swiglu"
    assert closest("zzz", ["mlp", "swiglu"]) is None
    assert nearest("swigl", ["swiglu"]) == " Did you mean 'swiglu'?"
    assert nearest("zzz", ["swiglu"]) == ""
    assert (
        unknown("ffn", "mpl", ["swiglu", "mlp"])
        == "unknown ffn 'mpl'. Did you mean 'mlp'? Options: mlp, swiglu."
    )


def test_a_report_fits_one_screen():
    assert report(["a"], "train.py") == "train.py: a"
    assert report(["a", "a"], "train.py") == "train.py: a"
    text = report([f"problem {i}" for i in range(100)], "train.py")
    assert text.splitlines()[0] == "train.py: 100 problems"
    assert text.splitlines()[-1] == "  ... and 88 more"
    assert len(text.splitlines()) < 24


@pytest.mark.parametrize(
    "line",
    [
        "ffn=swiglu act=relu2",
        "norm@norm_ffn=none",
        "stream=[x0_lambdas,backout]",
        "stream=[]",
        "probe=[]",
        "residual.scale=learned",
        "arch=speedrun threshold=learned threshold.init=-0.5",
        "optim={lr:0.01}",
        "hydra.launcher.parallel=2",
    ],
)
def test_good_command_lines_have_no_problems(problems: Explain, line: str):
    assert problems(line) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ffn=swigl", "Did you mean 'swiglu'? Options: bilinear"),
        ("norm@norm_ffn=nne", "unknown norm 'nne'. Did you mean 'none'?"),
        ("norm@norm_fn=none", "Did you mean 'norm@norm_ffn'?"),
        ("ffn=3", "unknown ffn '3'. Options: "),
        ("ffn=null", "ffn needs a choice. ffn=none is the absence of it. Options: "),
        ("act=", "act needs a choice. Options: "),
        ("skip=null", "skip=none is the absence of it."),
        ("+ffn=swiglu", "write ffn=swiglu"),
        ("ffn=[mlp,swiglu]", "-m ffn=mlp,swiglu"),
        ("probe=[default,nonesuch]", "unknown probe 'nonesuch'"),
        ("fnn=swiglu", "unknown key 'fnn'. Did you mean 'ffn'?"),
        ("lr=nan", "unknown key 'lr'. Did you mean 'optim.lr'?"),
        ("optim.lrr=0.1", "Did you mean 'optim.lr'?"),
        ("n_layers=3", "Did you mean 'model.n_layers'?"),
        ("mdoel.n_layers=3", "Did you mean 'model.n_layers'?"),
        ("trian.stesp=3", "Did you mean 'train.steps'?"),
        (
            "threshold.init=0.5",
            "threshold=none has no 'init'; it belongs to threshold=fixed, threshold=learned",
        ),
        ("++ffn.foo=1", "unknown key 'ffn.foo'; keys of ffn: "),
        ("+unknown=1", "unknown key 'unknown'"),
        ("+seed=1", "seed exists; write seed=1"),
        ("'~actt'", "Did you mean 'act'?"),
        ("'~act'", "act"),
        ("norm_ffn=none", "choose norm@norm_ffn=none"),
        ("train=5", "set one of its keys, train.NAME=VALUE"),
        ("seed=", "seed=''"),
        ("seed=-1", "seed=-1"),
        ("optim.lr=nan", "optim.lr=nan: expected a finite number"),
        ("train.steps=abc", "train.steps='abc': expected an integer"),
        ("train.steps=0", "train.steps=0"),
        ("model.n_heads=5", "does not divide"),
        ("ffn=mlp,swiglu", "add -m to run each"),
        ('"ffn=\'swiglu"', "the quote ' is not closed"),
        ("'x=[1,2'", "[ and ] do not match"),
        ("swiglu", "Did you mean 'ffn=swiglu'?"),
        ("a=b=c", "quote it"),
        ("=3", "expected KEY=VALUE"),
        ("'ffn =swiglu'", "no space before '='"),
        ("'model.value_embeddings[0]=3'", "a list is set as a whole"),
        ("'seed=${nope}'", "'nope' not found"),
        ("'out=${oc.env:HOME}'", "only references to other keys are allowed"),
        ("hydra/launcher=proces", "unknown hydra/launcher 'proces'. Did you mean 'process'?"),
        ("hydra.launcher.paralel=2", "Did you mean 'hydra.launcher.parallel'?"),
        ("hydra.launcher.parallel=two", "hydra.launcher.parallel=two"),
        ("hydra.mode=FOO", "expected one of [RUN, MULTIRUN]"),
    ],
)
def test_one_problem_is_one_line_with_what_to_do(problems: Explain, line: str, said: str):
    (problem,) = (
        problems(line) if line not in ("seed=", "seed=-1") else problems(line)[:1]
    )  # data.seed follows seed
    assert said in problem
    assert "\n" not in problem
    assert len(problem) < 300


def test_several_problems_are_all_listed(problems: Explain):
    found = problems(
        "ffn=swigl act=rellu2 train.stps=10 optim.lr=nan swiglu 'x=\"' +foo=1 model.n_layers=2.5"
    )
    for said in (
        "swiglu'?",
        "relu2'?",
        "train.steps'?",
        "optim.lr=nan",
        "'ffn=swiglu'",
        "quote",
        "'foo'",
        "2.5",
    ):
        assert any(said in problem for problem in found), said
    assert len(found) == 8


def test_choices_that_only_fail_together_are_explained(problems: Explain):
    assert problems("threshold=learned threshold.init=0.5 model.d_model=130")  # heads do not divide
    assert problems("threshold=learned threshold.init=0.5") == []


def test_a_users_own_folder_is_looked_into(problems: Explain, tmp_path: Path):
    (tmp_path / "ffn").mkdir()
    (tmp_path / "ffn" / "mine.yaml").write_text("_target_: ffnlab.nn.ffn.mlp.MLP\n")
    assert problems(f"hydra.searchpath=[file://{tmp_path}] ffn=mine") == []
    (problem,) = problems(f"hydra.searchpath=[file://{tmp_path}] ffn=mne")
    assert "mine" in problem


def test_validation_is_called_with_what_is_left(root: Path):
    seen: list[DictConfig] = []
    found = explain(["seed=3", "ffn=swigl"], config_loader(root / "configs"), seen.append)
    assert len(found) == 1
    assert seen[0].seed == 3
    assert "hydra" not in seen[0]


def test_train_says_all_problems_and_leaves_nothing(tmp_path: Path, root: Path):
    done = train("ffn=swigl", "trian.steps=3", cwd=tmp_path, root=root)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "train.py: 2 problems"
    assert len(done.stderr.splitlines()) == 3
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ffn=swiglu"], "unknown option --ffn=swiglu"),
        (["--experimental-re", "evil.pickle"], "runs code from a pickle"),
        pytest.param(["--multrun", "ffn=mlp"], "Did you mean '--multirun'?", marks=pytest.mark.slow),
        pytest.param(["-m", "--cfg", "job"], "only one of", marks=pytest.mark.slow),
        pytest.param(["--resolve"], "--resolve goes with", marks=pytest.mark.slow),
        pytest.param(["--cfg", "jobs"], "invalid choice", marks=pytest.mark.slow),
    ],
)
def test_wrong_usage_is_exit_2(tmp_path: Path, root: Path, arguments: list[str], said: str):
    done = train(*arguments, cwd=tmp_path, root=root)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_refused_under_torchrun_and_inside_a_job(tmp_path: Path, root: Path):
    done = train("-m", "seed=0,1", cwd=tmp_path, root=root, WORLD_SIZE="2")
    assert (done.returncode, "torchrun" in done.stderr) == (1, True)
    done = train("-m", "seed=0,1", cwd=tmp_path, root=root, FFNLAB_JOB="0")
    assert (done.returncode, "job of a sweep" in done.stderr) == (1, True)


def test_flags_and_overrides_may_be_mixed(tmp_path: Path, root: Path):
    done = train("ffn=swiglu", "--cfg", "job", "seed=3", cwd=tmp_path, root=root)
    assert done.returncode == 0
    assert "seed: 3" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_is_quiet(tmp_path: Path, root: Path):
    done = subprocess.run(  # noqa: S602 - the shell's pipe is what is tested
        f"{shlex.quote(sys.executable)} {shlex.quote(str(root / 'train.py'))} --help | head -1",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_tab_completion_knows_the_choices(tmp_path: Path, root: Path):
    done = train(
        "-sc", "query=bash", cwd=tmp_path, root=root, COMP_LINE="python train.py ffn=swig", COMP_POINT="24"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ffn=swiglu"]


@pytest.mark.slow
def test_an_error_of_ours_is_one_line_and_a_traceback_on_request(tmp_path: Path, root: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import ffnlab.run\ndef run(*a): raise TypeError('x')\nffnlab.run.run = run\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = train(cwd=tmp_path, root=root, PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr == "train.py: internal error: TypeError: x (HYDRA_FULL_ERROR=1 shows where)\n"
    done = train(cwd=tmp_path, root=root, PYTHONPATH=path, HYDRA_FULL_ERROR="1")
    assert "Traceback" in done.stderr
