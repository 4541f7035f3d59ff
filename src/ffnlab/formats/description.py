"""Reading the config.json of a model that others saved: values checked, problems collected."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ffnlab.errors import UserError, nearest

LARGEST = 2**31


@dataclass(frozen=True)
class Reading:
    """What a description means here: the overrides that compose the configuration, and the vocabulary."""

    overrides: list[str]
    vocab_size: int


class Description:
    """Key by key out of a config.json; `done` raises one UserError with all that was wrong or unsupported."""

    def __init__(self, values: Mapping[str, Any]):
        self.values, self.problems = values, []

    def get(self, key: str, default: Any) -> Any:
        """The value; null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < LARGEST:
            return value
        self.problems.append(f"{key}={json.dumps(value)}: expected a positive whole number")
        return 1

    def positive(self, key: str, value: Any) -> float:
        """A positive number, `value` being what the description says."""
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        self.problems.append(f"{key}={json.dumps(value)}: expected a positive number")
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.problems.append(f"{key}={json.dumps(value)}: expected true or false")
        return bool(value)

    def only(self, key: str, value: Any, supported: Any) -> None:
        """Nothing, if the value is the one that is supported here."""
        if value != supported:
            self.problems.append(f"{key}={json.dumps(value)} is not supported, only {json.dumps(supported)}")

    def one_of(self, key: str, options: Sequence[str], default: str) -> str:
        """A name out of several."""
        value = self.get(key, default)
        if value in options:
            return value
        hint = f"{nearest(str(value), options)} Supported: {', '.join(options)}"
        self.problems.append(f"{key}={json.dumps(value)} is not supported.{hint}")
        return default

    def done(self) -> None:
        """Raise what was found."""
        if self.problems:
            raise UserError(*(f"config.json: {problem}" for problem in self.problems))
