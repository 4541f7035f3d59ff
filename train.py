"""Train one Transformer, or sweep over many: `python train.py ffn=swiglu act=relu2`; --help tells more.

The one entry of Hydra. Exit codes: 0 done, or done before; 1 wrong input, or a job of a sweep failed;
2 usage; 3 diverged; 130 and 143 signals.
"""

import argparse
import os
import signal
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHOW_TRACEBACKS = os.environ.get("HYDRA_FULL_ERROR") == "1"
# Threads that wait give their core away: a few per cent slower on idle cores, but on shared ones spinning
# threads trained three to ten times slower. OMP_WAIT_POLICY=ACTIVE in the environment asks for spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach main(), which says all that is wrong on one screen

try:
    import hydra
    from hydra._internal.utils import get_args_parser
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from ffnlab import explain
    from ffnlab.errors import UserError, internal, nearest, plain_warnings, report
    from ffnlab.withheld import masked
except ModuleNotFoundError as missing:
    sys.exit(
        f"train.py: no module {missing.name!r}. Run `make setup` once, then .venv/bin/python train.py ..."
    )
except KeyboardInterrupt:
    print("train.py: interrupted", file=sys.stderr)
    sys.exit(130)


class Passed(BaseException):
    """Carries an exception of a run past Hydra, which would print a line of its own first."""


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def job(cfg: DictConfig) -> float:
    """One run; its validation loss is the objective of a sweeper, inf when it diverged."""
    from ffnlab import config, run, train
    from ffnlab.analysis.at_end import at_end

    hydra_cfg = HydraConfig.get()
    try:
        choices = dict(hydra_cfg.runtime.choices)
        own = config.trusted(config.plain(cfg), choices, list(hydra_cfg.overrides.task))
        return run.run(own, choices, at_end).get("val/loss", float("nan"))
    except Exception as error:
        if hydra_cfg.mode == RunMode.RUN:
            raise Passed(error) from error
        # Only a launcher that runs jobs in this process comes here; to it a diverged run is a result.
        if isinstance(error, train.Diverged):
            return float("inf")
        raise


def main() -> int:
    """Hand the command line to Hydra, and turn whatever comes out into a message and an exit code."""
    plain_warnings()
    signal.signal(signal.SIGTERM, terminated)
    try:
        attempt(*parse(sys.argv[1:]))
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except (Exception, KeyboardInterrupt) as error:
        return say(error)


def terminated(signum: int, frame: object) -> None:
    """SIGTERM where no run listens for it: leave through the clean-ups, with the code that schedulers
    expect.
    """
    raise SystemExit(128 + signum)


def attempt(args: argparse.Namespace, flags: list[str]) -> None:
    """Do what the command line says; raises UserError with all that is wrong, or what the run raised."""
    refuse_code(args)
    sweep = not shows(args) and sweeps(args)
    try:
        sys.argv = [sys.argv[0], *flags, *(as_sweep(args.overrides) if sweep else args.overrides)]
        job()
        return
    except Passed as passed:
        error = passed.args[0]
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as raised:
        error = raised
    of_input = isinstance(error, HydraException | OmegaConfBaseException | OSError | ValueError)
    if of_input and not isinstance(error, BrokenPipeError) and (problems := explained(args, sweep)):
        raise UserError(*problems) from error
    raise error


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Hydra's own parser, but flags and overrides may be mixed; on wrong usage exits 2, saying all of it."""
    parser = get_args_parser()
    args, strange = parser.parse_known_intermixed_args(argv)
    known = [option for action in parser._actions for option in action.option_strings]
    problems = [
        f"unknown option {word}.{nearest(word, known)} Overrides have no dashes: ffn=swiglu"
        for word in strange
    ]
    if args.experimental_rerun is not None:
        problems.append("--experimental-rerun runs code from a pickle; repeat the run's own command instead")
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


def refuse_code(args: argparse.Namespace) -> None:
    """Files of the user may choose parts; Hydra's callbacks, environment and logging would let them run
    code.
    """
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        raise UserError(f"--config-dir {args.config_dir}: no such folder")
    about = [o for o in args.overrides if o.lstrip("+~").startswith(("hydra.", "hydra/", "experiment="))]
    if args.config_dir is None and not any("searchpath" in o for o in about):
        return  # only files of this project are read
    try:
        cfg = config_loader(args).load_configuration(config_name(args), args.overrides, RunMode.RUN).hydra
    except Exception:
        return  # the real composition fails too, and is explained
    found = [key for key in ("callbacks", "job.env_set") if OmegaConf.select(cfg, key)]
    found += [
        key
        for key in ("job_logging", "hydra_logging")
        if cfg.runtime.choices.get(f"hydra/{key}") != "disabled"
    ]
    found = [
        key
        for key in found
        if not any(o.lstrip("+").startswith(("hydra." + key, "hydra/" + key)) for o in about)
    ]
    if found:
        raise UserError(
            *(
                f"hydra.{key} is set by a file, which could run code: it may only be given here"
                for key in found
            )
        )


def shows(args: argparse.Namespace) -> bool:
    """Whether the command only prints something."""
    return bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)


def own(overrides: list[str], *more: str) -> list[str]:
    """The overrides of Hydra's settings and, as it may hold some, `more`: the experiment."""
    return [o for o in overrides if o.lstrip("+~").startswith(("hydra.", "hydra/", *more))]


def sweeps(args: argparse.Namespace) -> bool:
    """Whether this command line is a sweep of ours: by -m, or by the experiment that it chooses."""
    about = own(args.overrides, "experiment=")
    if not (args.multirun or about):
        return False
    try:
        cfg = config_loader(args).load_configuration(config_name(args), about, RunMode.MULTIRUN).hydra
    except (HydraException, OSError, ValueError):
        return False  # the real composition fails too, and is explained
    if not (args.multirun or cfg.mode == RunMode.MULTIRUN):
        return False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "a sweep cannot run under torchrun: start it with python, each job is its own process"
        )
    if "FFNLAB_JOB" in os.environ:
        raise UserError("this is a job of a sweep, and cannot start a sweep of its own")
    return cfg.runtime.choices.get("hydra/sweeper") == "arms"


def as_sweep(overrides: list[str]) -> list[str]:
    """The command line of a sweep for Hydra: what is about the sweep, and the whole line for the sweeper.

    Hydra would compose it as if it were one job, and refuse `-m ffn=mlp,moe ffn.n_experts=4`, which fits one
    of two.
    """
    settings = own(overrides)
    quoted = [QuotedString(o, Quote.single).with_quotes() for o in overrides if o not in settings]
    line = f"hydra.sweeper.command=[{','.join(quoted)}]"
    return [*own(overrides, "experiment="), line, "hydra.mode=MULTIRUN"]


def explained(args: argparse.Namespace, sweep: bool) -> list[str]:
    """All problems of the command line; of a sweep those of its settings, as the sweeper knows its jobs."""
    from ffnlab.config import plain
    from ffnlab.validate import validate

    overrides = own(args.overrides, "experiment=") if sweep or args.multirun else args.overrides
    return explain.explain(
        overrides, config_loader(args), lambda cfg: validate(plain(cfg)), config_name(args)
    )


def config_name(args: argparse.Namespace) -> str:
    """The primary config, train unless --config-name says otherwise."""
    return (args.config_name or "train").removesuffix(".yaml")


def config_loader(args: argparse.Namespace) -> ConfigLoader:
    """Hydra's loader for this command line."""
    return explain.config_loader(HERE / (args.config_path or "configs"), args.config_dir)


def say(error: BaseException) -> int:
    """One screen on stderr; the exit code."""
    code, problems = 1, [internal(error)]
    if isinstance(error, UserError):
        problems = error.problems
    elif isinstance(error, KeyboardInterrupt):
        code, problems = 130, ["interrupted"]
    elif type(error).__name__ == "Diverged":  # of ffnlab.train, which is slow to import
        code, problems = 3, [f"diverged: {error}"]
    elif SHOW_TRACEBACKS:
        print(masked("".join(traceback.format_exception(error))), file=sys.stderr)
    print(masked(report(problems, "train.py")), file=sys.stderr)  # the log of a sweep's job is a file, too
    return code


if __name__ == "__main__":
    sys.exit(main())
