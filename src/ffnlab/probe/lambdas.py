"""The learned numbers inside the layers that neither `gates` nor `threshold` reports."""

import re
from collections.abc import Iterator

from torch import Tensor, nn

from ffnlab.probe.base import Captured, Observation, Probe

LAYER = re.compile(r"blocks\.(\d+)\.(.+)")
ELSEWHERE = re.compile(
    r"parts\..*|.*\.threshold|blocks\.\d+\.residual\.\w+\.(scale|carry)"
)  # of other probes


class Lambdas(Probe):
    """Learned numbers inside the layers; the x0 lambdas, `probe/lambdas/L03/{x,x0}`, are those of `gates`.

    - `probe/lambdas/L03/{v,ve}`: the factors of v and of the value embedding in v <- l1 v + l2 e, where the
      attention of a layer has one.
    - `probe/lambdas/L03/<name>`: every other parameter that is one number, by its path in the block: Swish's
      beta is `L03/ffn_act_beta`; outside the blocks, Dynamic Tanh's of the final norm is `norm_alpha`. The
      parameter is given as it stands (xIELU's alphas before their softplus).
    Not here: thresholds C (`threshold`), residual scales and all under `parts` (`gates`).
    """

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        return Observation({f"probe/lambdas/{name}": value.item() for name, value in _numbers(model)})


def _numbers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # A number that layers share is reported by each.
    for path, parameter in model.named_parameters(remove_duplicate=False):
        match = LAYER.fullmatch(path)
        label, name = (f"L{int(match[1]):02d}/", match[2]) if match else ("", path)
        if name == "attn.value_lambdas":
            yield f"{label}v", parameter[0]
            yield f"{label}ve", parameter[1]
        elif parameter.dim() == 0 and not ELSEWHERE.fullmatch(path):
            yield label + name.replace(".", "_"), parameter
