"""nanoGPT (https://github.com/karpathy/nanoGPT): the names of its `GPT` and the arguments of its `GPTConfig`.

The head is the embedding there and stands in the file under both names, so that
`GPT(GPTConfig(**json)).load_state_dict(safetensors.torch.load_file(...))` is strict.
"""

from typing import Any

from ffnlab.formats import gpt2, parts
from ffnlab.formats.names import State

SAYS: parts.Says = {
    **gpt2.SAYS,
    "model.tie_head": [True],
    "norm.eps": [1e-5],
    "act._target_": ["ffnlab.nn.act.gelu.GELU"],
}


def describe(cfg: parts.Config, state: State, vocab_size: int) -> dict[str, Any]:
    """The arguments of `GPTConfig`; UserError with all that has no counterpart."""
    model, up = cfg["model"], state.get("blocks.0.ffn.up.weight")
    more = []
    if up is not None and len(up) != 4 * model["d_model"]:
        more = [
            f"d_ff={len(up)} has no counterpart in nanoGPT, which has 4 * d_model = {4 * model['d_model']}"
        ]
    gpt2.refuse(cfg, "nanoGPT", SAYS, more)
    return {
        "n_layer": model["n_layers"],
        "n_head": model["n_heads"],
        "n_embd": model["d_model"],
        "block_size": model["seq_len"],
        "bias": has_biases(state),
        "vocab_size": vocab_size,
        "dropout": 0.0,
    }


def has_biases(state: State) -> bool:
    """nanoGPT has them in all matrices and norms or in none."""
    return any(name.endswith(".bias") for name in state)


def theirs(state: State) -> State:
    """Our state dict under their names; where one bias is, the others are 0."""
    full = gpt2.with_all(state)
    if not has_biases(state):
        full = {name: tensor for name, tensor in full.items() if not name.endswith(".bias")}
    return {**gpt2.fused(full), gpt2.HEAD: full["embed.weight"]}
