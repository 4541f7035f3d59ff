"""Activations under the names that transformers has for them."""

ACTS = {  # choice of the group act -> its class; those without parameters and options
    "gelu": "ffnlab.nn.act.gelu.GELU",
    "gelu_tanh": "ffnlab.nn.act.gelu.GELUTanh",
    "relu": "ffnlab.nn.act.relu.ReLU",
    "relu2": "ffnlab.nn.act.relu.ReLU2",
    "relu6": "ffnlab.nn.act.relu.ReLU6",
    "silu": "ffnlab.nn.act.sigmoid.SiLU",
    "sigmoid": "ffnlab.nn.act.sigmoid.Sigmoid",
    "tanh": "ffnlab.nn.act.sigmoid.Tanh",
    "mish": "ffnlab.nn.act.softplus.Mish",
    "identity": "ffnlab.nn.act.identity.Identity",
}
HF = {  # name in transformers.activations.ACT2FN -> choice; the first of several names is the one written
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "relu6": "relu6",
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "mish": "mish",
    "linear": "identity",
}
TO_HF = {ACTS[choice]: name for name, choice in reversed(HF.items())}  # class -> name in transformers
