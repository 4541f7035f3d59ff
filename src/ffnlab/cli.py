"""The console script `ffnlab VERB ...`: every module of `ffnlab.verbs` (what computes with models) and of
`ffnlab.analysis.verbs` (what reads run directories) is a verb, imported when it is used; `import_` is
the verb `import`, since a module cannot have the name of a keyword.

A verb has a docstring (its help), `add_arguments(parser)` and `run(args) -> int`. Exit codes: the verb's own,
0 for done; 1 wrong input; 2 usage; 130 and 143 signals.
"""

import argparse
import ast
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Any, NamedTuple

from ffnlab.errors import UserError, internal, nearest, plain_warnings, report


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    plain_warnings()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as train.py: threads that wait give their core away
    try:
        code = dispatch(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `ffnlab ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt:
        problems, code = ["interrupted"], 130
    except UserError as error:
        problems, code = error.problems, 1
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        problems, code = [internal(error)], 1
    print(report(problems, program(argv)), file=sys.stderr)
    return code


def dispatch(argv: list[str]) -> int:
    """Find the verb, parse its arguments, run it."""
    known = verbs()
    listed = "\n".join(f"  {name:<12} {verb.help}" for name, verb in known.items())
    top = argparse.ArgumentParser(
        prog="ffnlab",
        description="The bench's tools. Training itself is `python train.py ffn=swiglu act=relu2`.",
        epilog=f"verbs:\n{listed}\n\n`ffnlab VERB --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"ffnlab {version('ffnlab')}")
    top.add_argument("verb", metavar="VERB", help="what to do")
    top.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    chosen = top.parse_args(argv)
    if chosen.verb not in known:
        top.error(f"unknown verb '{chosen.verb}'.{nearest(chosen.verb, known)} Verbs: {', '.join(known)}")
    module = importlib.import_module(known[chosen.verb].module)
    parser = argparse.ArgumentParser(
        prog=f"ffnlab {chosen.verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    args = parser.parse_args(chosen.rest)
    return explaining(module.run, args)


class Verb(NamedTuple):
    """Where a verb is, and the first line of its docstring."""

    module: str
    help: str


def verbs() -> dict[str, Verb]:
    """Every verb by name; imports none of them, so that `ffnlab --help` is quick."""
    found = {}
    for package in ("ffnlab.verbs", "ffnlab.analysis.verbs"):
        for file in files("ffnlab").joinpath(*package.split(".")[1:]).iterdir():
            source = file.joinpath("__init__.py") if file.is_dir() else file
            if source.is_file() and source.name.endswith(".py") and not file.name.startswith("_"):
                name = file.name.removesuffix(".py")
                text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
                found[name.removesuffix("_")] = Verb(f"{package}.{name}", text.partition("\n")[0].strip())
    return dict(sorted(found.items()))


def explaining(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """run(args); when that fails over a configuration (`args.overrides`), all that is wrong is said."""
    try:
        return run(args)
    except Exception as error:
        of_hydra = type(error).__module__.startswith(("hydra.", "omegaconf."))  # most verbs never import them
        if isinstance(error, BrokenPipeError) or not (of_hydra or isinstance(error, ValueError | OSError)):
            raise
        problems = explained(args)
        if not problems:
            raise
        raise UserError(*problems) from error


def explained(args: argparse.Namespace) -> list[str]:
    """The problems of the overrides that a verb takes; none where it takes none."""
    overrides: Any = getattr(args, "overrides", None)
    if not overrides:
        return []
    from ffnlab.config import config_dir, plain
    from ffnlab.explain import config_loader, explain
    from ffnlab.validate import validate

    return explain(overrides, config_loader(config_dir()), lambda cfg: validate(plain(cfg)))


def program(argv: list[str]) -> str:
    """The words in front of a message."""
    return f"ffnlab {argv[0]}" if argv and not argv[0].startswith("-") else "ffnlab"


if __name__ == "__main__":
    sys.exit(main())
