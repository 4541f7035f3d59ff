"""The families of transformers that come in and go out, by the `model_type` of their config.json."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ffnlab.errors import UserError, unknown
from ffnlab.formats import gpt2, llama
from ffnlab.formats.description import Reading
from ffnlab.formats.names import State
from ffnlab.formats.parts import Config


@runtime_checkable
class Family(Protocol):
    """What gpt2.py and llama.py have in common."""

    EMBEDDING: str
    HEAD: str

    def read(self, config: Mapping[str, Any]) -> Reading: ...

    def describe(self, cfg: Config, state: State, vocab_size: int, end: int | None) -> dict[str, Any]: ...

    def theirs(self, state: State) -> State: ...

    def ours(self, state: State) -> State: ...

    def canonical(self, name: str) -> str | None: ...


FAMILIES: dict[str, Family] = {"gpt2": gpt2, **dict.fromkeys(llama.ARCHITECTURES, llama)}


def family_in(config: Mapping[str, Any]) -> Family:
    """The family that a config.json speaks of."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"config.json: {unknown('model_type', str(kind), FAMILIES)}")
    return FAMILIES[kind]


def family_out(cfg: Config) -> Family:
    """The family that comes nearest to a model of ours: GPT-2 where positions are learned, else Llama."""
    return gpt2 if cfg["attention"].get("position") == "learned" else llama
