"""Learned numbers of the layers, each reported once."""

import pytest
import torch

from ffnlab.probe.base import Captured
from ffnlab.probe.lambdas import Lambdas


def test_numbers_of_a_layer_by_their_place(look):
    overrides = ["act=swish", "norm=dyt", "residual.scale=learned", "stream=[x0_lambdas,smear]"]
    overrides += ["model.value_embeddings=[[1,2]]", "threshold=learned"]
    gpt = look("probe=[]", *overrides)[0]
    with torch.no_grad():
        gpt.blocks[2]["attn"].value_lambdas.copy_(torch.tensor([0.25, 0.75]))
        gpt.blocks[3]["ffn"].act.act.beta.fill_(1.5)
        gpt.blocks[0]["residual"]["attn"].norm.alpha.fill_(0.3)
        gpt.norm.alpha.fill_(0.7)
    seen = Lambdas(every=1).read(Captured(torch.empty(0, dtype=torch.long), {}), gpt).scalars
    expected = {
        "L02/v": 0.25,
        "L02/ve": 0.75,
        "L03/ffn_act_act_beta": 1.5,
        "L00/residual_attn_norm_alpha": 0.3,
    }
    expected |= {"norm_alpha": 0.7, "L01/v": 0.5}
    for name, value in expected.items():
        assert seen[f"probe/lambdas/{name}"] == pytest.approx(value)
    assert len(seen) == 2 * 2 + 4 + 8 + 1  # v and ve of two layers, beta, two alphas a layer, the last norm's


def test_nothing_is_reported_twice(look):
    overrides = ["residual.scale=learned", "residual.carry=learned", "stream=[x0_lambdas,backout,smear]"]
    overrides += ["skip=unet", "threshold=learned", "act=star_relu"]
    seen = look("probe=[lambdas,gates,threshold]", *overrides)[3].scalars
    alone = look("probe=[lambdas]", *overrides)[3].scalars
    assert set(alone) == {
        f"probe/lambdas/L{i:02d}/ffn_act_act_{name}" for i in range(4) for name in ("scale", "bias")
    }
    others = look("probe=[gates,threshold]", *overrides)[3].scalars
    assert not alone.keys() & others.keys()
    assert seen == {**alone, **others}


def test_a_plain_model_has_none(look):
    assert look("probe=[lambdas]")[3].scalars == {}


def test_a_number_that_layers_share_is_reported_by_each(look):
    seen = look("probe=[lambdas]", "act=swish", "ffn.share=all")[3].scalars
    assert set(seen) == {f"probe/lambdas/L{i:02d}/ffn_act_beta" for i in range(4)}
