"""The vocabulary of a byte-level BPE tokenizer, as transformers writes it into a folder."""

from collections.abc import Sequence
from pathlib import Path

from ffnlab.formats.folder import read_json


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id, out of vocab.json or tokenizer.json; None where the folder has no BPE tokenizer."""
    if (folder / "vocab.json").is_file():
        return read_json(folder / "vocab.json")
    if not (folder / "tokenizer.json").is_file():
        return None
    model = read_json(folder / "tokenizer.json").get("model")
    vocab = model.get("vocab") if isinstance(model, dict) and model.get("type") == "BPE" else None
    return vocab if isinstance(vocab, dict) else None


def byte_level(tokens: Sequence[bytes]) -> dict[str, int]:
    """Token -> id in GPT-2's spelling: printable bytes as themselves, the others as characters from U+0100 on
    (`encoder.py` of https://github.com/openai/gpt-2).
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in shown]
    spelling = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    return {"".join(spelling[byte] for byte in token): i for i, token in enumerate(tokens)}
