"""Train one Transformer, or sweep over many: `python train.py ffn=swiglu act=relu2`; `python train.py --help`.

The one entry of Hydra. Exit codes: 0 done, or done before; 1 wrong input; 2 usage; 3 diverged; 130 and 143 signals.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHOW_TRACEBACKS = os.environ.get("HYDRA_FULL_ERROR") == "1"
os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach main(), which says all that is wrong on one screen

try:
    import hydra
    from hydra._internal.utils import get_args_parser
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    from ffnlab.errors import UserError, nearest, report
except ModuleNotFoundError as missing:
    sys.exit(f"train.py: no module {missing.name!r}. Run `make setup` once, then .venv/bin/python train.py ...")


class Passed(BaseException):
    """Carries an exception of a run past Hydra, which would print a line of its own first."""


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def job(cfg: DictConfig) -> float:
    """One run; its validation loss is the objective of a sweeper, inf when it diverged."""
    from ffnlab import config, run, train

    hydra_cfg = HydraConfig.get()
    try:
        return run.run(config.plain(cfg), dict(hydra_cfg.runtime.choices)).get("val/loss", float("nan"))
    except Exception as error:
        if hydra_cfg.mode == RunMode.RUN:
            raise Passed(error) from error
        if isinstance(error, train.Diverged):  # a launcher that runs jobs in this process: a result, not a failure
            return float("inf")
        raise


def main() -> int:
    """Look at the command line, hand it to Hydra, and turn whatever comes out into a message and an exit code."""
    try:
        attempt(*parse(sys.argv[1:]))
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except (Exception, KeyboardInterrupt) as error:
        return say(error)


def attempt(args: argparse.Namespace, flags: list[str]) -> None:
    """Do what the command line says; raises UserError with all that is wrong with it, or what the run raised."""
    try:
        sweep = not shows(args) and sweeps(args)
        sys.argv = [sys.argv[0], *flags, *(as_sweep(args.overrides) if sweep else args.overrides)]
        job()
        return
    except Passed as passed:
        error = passed.args[0]
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as raised:
        error = raised
    if isinstance(error, HydraException | OmegaConfBaseException | OSError | ValueError) and not isinstance(error, BrokenPipeError):
        problems = explained(args)
        if problems:
            raise UserError(*problems) from error
    raise error


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Hydra's own parser, but flags and overrides may be mixed, and what it refuses is explained; exits 2 on wrong usage."""
    parser = get_args_parser()
    args, strange = parser.parse_known_intermixed_args(argv)
    known = [option for action in parser._actions for option in action.option_strings]
    problems = [f"unknown option {word}.{nearest(word, known)} Overrides have no dashes: ffn=swiglu" for word in strange]
    if args.experimental_rerun is not None:
        problems.append("--experimental-rerun runs code from a pickle; start the run's own command with out=RUN instead")
    if sum([args.run, args.multirun, bool(args.cfg), args.info is not None, args.shell_completion]) > 1:
        problems.append("only one of --run, --multirun, --cfg, --info and --shell-completion at a time")
    if args.resolve and not (args.cfg or args.help):
        problems.append("--resolve goes with --cfg or --help")
    if problems:
        print(report(problems, "train.py"), file=sys.stderr)
        sys.exit(2)
    flags = list(argv)
    for override in args.overrides:
        flags.remove(override)
    return args, flags


def shows(args: argparse.Namespace) -> bool:
    """Whether the command only prints something."""
    return bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)


def own(overrides: list[str]) -> list[str]:
    """The overrides that are about the sweep itself: Hydra's settings, and the experiment that may hold them."""
    return [o for o in overrides if o.lstrip("+~").startswith(("hydra.", "hydra/", "experiment="))]


def sweeps(args: argparse.Namespace) -> bool:
    """Whether this command line is a sweep of ours: by -m, or by the experiment that it chooses."""
    if not (args.multirun or own(args.overrides)):
        return False
    with config_loader(args) as loader:
        try:
            cfg = loader.load_configuration(config_name(args), own(args.overrides), RunMode.MULTIRUN).hydra
        except (HydraException, OSError, ValueError):
            return False  # the real composition fails too, and is explained
    if not (args.multirun or cfg.mode == RunMode.MULTIRUN):
        return False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a sweep cannot run under torchrun: start it with python, every job is a process of its own")
    if "FFNLAB_JOB" in os.environ:
        raise UserError("this is a job of a sweep, and cannot start a sweep of its own")
    return cfg.runtime.choices.get("hydra/sweeper") == "arms"


def as_sweep(overrides: list[str]) -> list[str]:
    """Hydra composes the command line of a sweep as if it were one job, which one that only fits some jobs would not
    survive (-m ffn=mlp,moe ffn.n_experts=4). So Hydra gets what is about the sweep, and the sweeper the whole line."""
    quoted = ",".join(QuotedString(o, Quote.single).with_quotes() for o in overrides if not o.startswith("hydra"))
    return [*own(overrides), f"hydra.sweeper.command=[{quoted}]", "hydra.mode=MULTIRUN"]


def explained(args: argparse.Namespace) -> list[str]:
    """All problems of the command line; of a sweep those of its own settings, as the sweeper explains its jobs."""
    from ffnlab.config import plain
    from ffnlab.explain import explain
    from ffnlab.validate import validate

    overrides = own(args.overrides) if args.multirun else args.overrides
    with config_loader(args) as loader:
        return explain(overrides, loader, lambda cfg: validate(plain(cfg)), config_name(args))


def config_name(args: argparse.Namespace) -> str:
    """The primary config, train unless --config-name says otherwise."""
    return (args.config_name or "train").removesuffix(".yaml")


@contextmanager
def config_loader(args: argparse.Namespace) -> Iterator[Any]:
    """Hydra's loader for this command line, with --config-path and --config-dir."""
    with hydra.initialize_config_dir(str(HERE / (args.config_path or "configs")), version_base="1.3"):
        loader: Any = GlobalHydra.instance().config_loader()
        if args.config_dir:
            path, before = f"file://{os.path.abspath(args.config_dir)}", SearchPathQuery(provider="schema")
            loader.get_search_path().prepend("command-line", path, before)
            loader.repository.initialize_sources(loader.get_search_path())
        yield loader


def say(error: BaseException) -> int:
    """One screen on stderr; the exit code."""
    code, problems = 1, [f"internal error: {type(error).__name__}: {error} (HYDRA_FULL_ERROR=1 shows where)"]
    if isinstance(error, UserError):
        problems = error.problems
    elif isinstance(error, KeyboardInterrupt):
        code, problems = 130, ["interrupted"]
    elif type(error).__name__ == "Diverged":  # of ffnlab.train, which is slow to import
        code, problems = 3, [f"diverged: {error}"]
    elif SHOW_TRACEBACKS:
        traceback.print_exception(error)
    print(report(problems, "train.py"), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
