"""What config.yaml and run.json of a run directory say, as plain values of the types that readers rely on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ffnlab import foreign
from ffnlab.errors import UserError
from ffnlab.record.runs import no_run

_RESTORE = (
    "restore it from a copy (train.py wrote it, and no tool changes it), or train anew with another out=..."
)
# What readers rely on; keys that are not named here may hold anything.
_CONFIG: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "train", "data", "tokenizer", "optim", "schedule", "attention"), (dict,)),
    **dict.fromkeys(("norm", "norm_ffn", "skip", "threshold", "act", "ffn", "logger", "probe"), (dict,)),
    **{"checkpoint": (dict,), "stream": (dict, list), "plugins": (list,), "seed": (int,)},
    **dict.fromkeys(("out", "study", "arm"), (str,)),
}
_INFO: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "name", "status", "created", "precision", "diverged", "host"), (str,)),
    **dict.fromkeys(("choices", "final", "timings", "data", "device", "versions", "seeds", "git"), (dict,)),
    **dict.fromkeys(("token_share", "skippable_flops_per_token", "kernels"), (dict,)),
    **dict.fromkeys(("command", "warnings", "spikes"), (list,)),
    **dict.fromkeys(("parameters", "flops_per_token", "threads", "processes", "vocab_size"), (int, float)),
}


def load_config(run: Path) -> dict:
    """The resolved config of a run as plain data. UserError when missing, broken or holding a '${'."""
    path = run / "config.yaml"
    try:
        config = foreign.read_yaml(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(no_run(run)) from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text: {_RESTORE}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", from line {mark.line + 1} on" if mark else ""
        what = getattr(error, "problem", None) or ""
        why = f" ({what})" if what.endswith("not read") else ""
        raise UserError(f"{path} is not plain YAML{where}{why}: {_RESTORE}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): it must be readable to you") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no keys (expected seed, model, train, ...): {_RESTORE}")
    for key, value in leaves(config):
        if "${" in key or "${" in str(value):
            raise UserError(
                f"{path}: {key} holds '${{', which train.py never writes into the config of a run: {_RESTORE}"
            )
    if wrong := foreign.wrong_types(config, _CONFIG) or _strange_targets(config):
        raise UserError(*(f"{path}: {problem}: {_RESTORE}" for problem in wrong))
    return config


def _strange_targets(config: dict) -> list[str]:
    """Parts that neither ffnlab nor a package in the run's own `plugins` can have given."""
    plugins = config.get("plugins") or []
    if not all(isinstance(name, str) and foreign.NAME.fullmatch(name) for name in plugins):
        return [f"plugins is {plugins!r}, expected names of packages"]
    return [
        f"_target_ {target!r} is no class of {' or '.join(['ffnlab', *plugins])}"
        for target in foreign.targets(config)
        if not foreign.NAME.fullmatch(target)
        or "__" in target
        or ("." in target and target.split(".")[0] not in ("ffnlab", *plugins))  # without a dot: no module
    ]


def read_info(path: Path) -> dict[str, Any]:
    """What run.json of a run directory says; empty where there is none."""
    try:
        info = foreign.read_json(path / "run.json", path)
        info = info if isinstance(info, dict) else {}
        if wrong := foreign.wrong_types(info, _INFO):
            raise ValueError("; ".join(wrong))
        if not foreign.plain_name(info.get("id", "0")):  # W&B makes folders of it
            raise ValueError(f"id is {info['id']!r}, expected letters and digits")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        file, again = path / "run.json", "the command of the run with the same out= writes it anew"
        raise UserError(f"{file} cannot be read ({error}): remove it, and {again}") from None
    return info


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key."""
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, node
