"""Causality: the gradient of an output with respect to a later input is exactly zero, stabilizers included."""

from collections.abc import Iterable

import pytest
import torch

from hf_linattn import AttentionConfig, LinAttnPreTrainedModel

from ...helpers import config_id, prompts, tokens
from .cases import DECODER, DECODERS, make_model

pytestmark = pytest.mark.core


def check_no_output_depends_on_a_later_input(
    model: LinAttnPreTrainedModel, positions: Iterable[int], *, use_cache: bool | None = None
) -> None:
    """Of a row, and of one that is padded in front."""
    mask = prompts(40, 29)["attention_mask"]
    embeddings = model.get_input_embeddings()(tokens(40, batch=2)).detach().requires_grad_()
    position_ids = (mask.cumsum(-1) - 1).clamp_min(0)
    options = {} if use_cache is None else {"use_cache": use_cache}
    logits = model(inputs_embeds=embeddings, attention_mask=mask, position_ids=position_ids, **options).logits
    for i in positions:
        weight = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(i))
        # padding is looked at by nobody, and has no output that is read
        valid = mask[:, i].bool()
        (gradient,) = torch.autograd.grad(
            ((logits[:, i] * weight).sum(-1) * valid).sum(), embeddings, retain_graph=True
        )
        assert gradient.isfinite().all()
        assert (gradient[:, i + 1 :] == 0).all()
        assert (gradient[valid, i].abs().sum(-1) > 0).all()
        assert (gradient[1, :11] == 0).all()


@pytest.mark.parametrize(("architecture", "config"), DECODERS, ids=config_id)
def test_no_output_depends_on_a_later_input(architecture: str, config: AttentionConfig) -> None:
    model = make_model(architecture, config)
    if architecture != DECODER:
        check_no_output_depends_on_a_later_input(model, (12, 20, 38))
        return
    for use_cache in (False, True):
        check_no_output_depends_on_a_later_input(model, (0, 1, 3, 7, 8, 20, 38), use_cache=use_cache)


@pytest.mark.parametrize(("architecture", "config"), DECODERS, ids=config_id)
def test_nor_without_a_mask(architecture: str, config: AttentionConfig) -> None:
    model = make_model(architecture, config)
    embeddings = model.get_input_embeddings()(tokens(40)).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings).logits[0]
    for i in (0, 1, 3, 7, 8, 20, 38):
        weight = torch.randn(logits.shape[1:], generator=torch.Generator().manual_seed(i))
        (gradient,) = torch.autograd.grad((logits[i] * weight).sum(), embeddings, retain_graph=True)
        assert gradient.isfinite().all()
        assert (gradient[0, i + 1 :] == 0).all()
        assert gradient[0, i].abs().sum() > 0
