"""Secrets in the environment (keys, tokens, passwords), kept out of all that is written."""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping

from ffnlab.errors import UserError

NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
LEAST = 8  # characters: a shorter value (TOKENIZERS_PARALLELISM=false, MAX_TOKENS=4096) is no secret


def secrets(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Value -> name of every variable whose name says that it holds a secret; a path to one is none."""
    found = {
        value: name
        for name, value in environ.items()
        if NAMES.search(name) and len(value) >= LEAST and not value.startswith(("/", "~"))
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))  # a longer one may hold a shorter one


def masked(text: str) -> str:
    """`text` with $NAME in place of every secret, also where it stands as JSON or Python write it."""
    for value, name in secrets().items():
        for spelt in (json.dumps(value)[1:-1], repr(value)[1:-1], value):
            text = text.replace(spelt, f"${name}")
    return text


def refuse_secrets(texts: Iterable[str]) -> None:
    """UserError where a text holds a secret: the texts of a configuration get into the record as they are."""
    known = secrets()
    found = dict.fromkeys(name for text in texts for value, name in known.items() if value in text)
    if found:
        raise UserError(
            *(f"the configuration holds the value of ${name}, which the record would show" for name in found)
        )


def command() -> list[str]:
    """The command line of this process, as the record may hold it."""
    return [masked(word) for word in sys.argv]
