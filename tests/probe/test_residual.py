"""The stream and its branches, from an ordinary pass and the placements' formulas."""

import numpy as np
import pytest
import torch
from torch.nn.functional import rms_norm

OPTIONS = ["probe=residual", "residual.scale=learned", "residual.scale_init=0.5", "residual.carry=0.9"]


def rms(x: torch.Tensor) -> torch.Tensor:
    return x.double().square().mean(-1).sqrt()


def expect(seen, label: str, role: str, branch: torch.Tensor, stream: torch.Tensor) -> None:
    """branch and stream at the probed positions (N, D)."""
    ratio = (rms(branch) / rms(stream)).mean().item()
    assert seen.scalars[f"probe/residual/{label}/{role}_ratio"] == pytest.approx(ratio, rel=1e-3)
    dot = (branch.double() * stream.double()).mean(-1) / (rms(branch) * rms(stream))
    assert seen.scalars[f"probe/residual/{label}/{role}_cosine"] == pytest.approx(dot.mean().item(), abs=1e-4)


@pytest.mark.parametrize("order", ["attn_ffn", "ffn_attn"])
@pytest.mark.parametrize("placement", ["pre", "post", "peri", "out", "none"])
def test_branch_and_stream_of_every_placement(look, passed, placement, order):
    gpt, tokens, mask, seen, _ = look(*OPTIONS, f"residual={placement}", f"model.order={order}")
    names = ["blocks.2", "blocks.2.residual.attn", "blocks.2.residual.ffn", "blocks.2.attn", "blocks.2.ffn"]
    held = passed(gpt, tokens, names)
    x = held["blocks.2"][0][mask]
    assert seen.scalars["probe/residual/L02/rms"] == pytest.approx(rms(x).mean().item(), rel=1e-4)
    for role in ("attn", "ffn"):
        stream, after = (value[mask] for value in held[f"blocks.2.residual.{role}"])
        if placement == "post":  # what the norm is given cannot be told from what it gives
            branch = 0.5 * held[f"blocks.2.{role}"][1][mask]
            torch.testing.assert_close(rms_norm(0.9 * stream + branch, (32,), eps=1e-6), after)
        else:
            branch = after - 0.9 * stream
        expect(seen, "L02", role, branch, 0.9 * stream)


def test_parallel_branches_join_the_same_stream(look, passed):
    gpt, tokens, mask, seen, _ = look(*OPTIONS, "model.order=parallel", "residual=peri")
    held = passed(gpt, tokens, ["blocks.1", "blocks.1.attn", "blocks.1.ffn"])
    x, after = (value[mask] for value in held["blocks.1"])
    branches = {
        role: 0.5 * rms_norm(held[f"blocks.1.{role}"][1][mask], (32,), eps=1e-6) for role in ("attn", "ffn")
    }
    torch.testing.assert_close(0.81 * x + sum(branches.values()), after)
    for role, branch in branches.items():
        expect(seen, "L01", role, branch, 0.81 * x)


def test_a_branch_that_starts_at_zero(look):
    seen = look("probe=residual", "model.zero_out=true")[3]
    assert np.isfinite(list(seen.scalars.values())).all()
    assert {seen.scalars[f"probe/residual/L03/{name}"] for name in ("ffn_ratio", "attn_cosine")} == {0.0}


def test_only_what_is_there(look):
    seen = look("probe=residual", "model.drop_attn=[1]", "model.drop_ffn=[2]", "ffn.extra=true")[3]
    measured = {name.removeprefix("probe/residual/") for name in seen.scalars if not name.endswith("cosine")}
    assert {name for name in measured if name.startswith("L01")} == {
        "L01/rms",
        "L01/ffn_ratio",
        "L01_extra/ffn_ratio",
    }
    assert {name for name in measured if name.startswith("L02")} == {"L02/rms", "L02/attn_ratio"}
