"""Initial values of linear attention from data: fitted, layer by layer, to the softmax attention that it replaces.

Nothing of the model itself is trained. Every layer is fitted on the queries, keys and values that it has in the base
model, and forgotten before the next one runs, so that memory holds one layer at a time.

* The features of Performer (`learned`) start from the same estimate of softmax with less variance: softmax(q.k) does
  not change when a vector mu is taken from all keys, and

      exp(q.k) = exp(q.mu) exp(k.nu) exp(-nu.mu) E[phi(a (q - nu)) . phi((k - mu) / a)]

  for any mu, nu and a, whose factors before the mean can be written into the features. The variance of FAVOR+ grows
  with |q + k|^2 (Choromanski et al. 2021, arXiv:2009.14794, Lemma 2): mu and nu are the means of keys and queries, and
  a makes both equally long. Then they are trained on the layer's own output.
* Features of a map with `init="moments"` are matched to the moments of queries and keys, in closed form (`moments`);
  those of `learned` are then trained.
* Prototypes of clusters are the centers of k-means over keys (`clustering`).
* The projections of Linformer (`learned`) are trained likewise, from segment means on.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from accelerate.utils import tqdm
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..data.documents import TOPICS, DataConfig, load_documents
from ..data.tokenizers import tokenizer_of
from ..modeling.architectures import ARCHITECTURES
from ..modeling.feature_maps import FeatureMap
from ..modeling.modeling_linattn import LinAttnPreTrainedModel, LinearAttention, self_attentions
from ..modeling.moments import match_moments
from .clustering import cluster_centers, logit_variances
from .softmax import AttentionCall, watch_attention

logger = logging.get_logger(__name__)

#: How many of Python's help texts are taken where no texts are given.
DEFAULT_TEXTS = 32
#: A decoder is calibrated on at most about as many tokens.
MAX_TOKENS = 8192
#: Steps of training, and sequences in each.
STEPS, BATCH_SIZE = 60, 2
_WARMUP = 5
# what does best on other documents: higher rates fit projections to the documents that they see
_RATES = {"features": 3e-2, "projection": 3e-4}
# Documents on which start and end are compared.
_COMPARED = 16


def calibrate(model: LinAttnPreTrainedModel, base: PreTrainedModel, documents: Sequence[Sequence[int]]) -> None:
    """Fit the linear attention of `model`, in place, to documents. The same documents give the same result.

    Args:
        model: a converted model that has not been trained.
        base: the softmax model that it was converted from.
        documents: token ids of each, no longer than `base` reads; about a hundred are enough.

    Raises:
        ValueError: a layer has nothing that is fitted, all layers share one module, or there is no document.
    """
    architecture = ARCHITECTURES[model.config.base_model_type]
    modules = [getattr(attention, "linattn", None) for _, attention in self_attentions(model, architecture)]
    check_calibration(model)
    # where nothing is far there is nothing to fit
    modules = [module if module is not None and module.config.far else None for module in modules]
    documents = [document for document in documents if len(document)]
    if not documents:
        raise ValueError("calibration_texts holds no text.")
    width = max(len(document) for document in documents)
    padding = base.config.pad_token_id or 0
    ids = torch.tensor([[*document, *[padding] * (width - len(document))] for document in documents])
    lengths = torch.tensor([len(document) for document in documents])
    mask = (torch.arange(width) < lengths[:, None]).long()
    bar = tqdm(total=sum(module is not None for module in modules), desc="Calibrating", unit="layer", leave=False)

    def visit(call: AttentionCall) -> None:
        module = modules[call.layer]
        if module is not None:
            # what a padded query gives is nobody's output
            _fit(module, call)
            bar.update(1)

    training = base.training
    without_cache = {"use_cache": False} if architecture.causal else {}
    try:
        # short rows too by linear attention: that is what is fitted
        with model.branches(exact=False), torch.no_grad(), watch_attention(base.eval(), visit):
            base.base_model(ids.to(base.device), attention_mask=mask.to(base.device), **without_cache)
    finally:
        base.train(training)
        bar.close()


def tokenized(
    texts: Sequence[str], tokenizer: Any, length: int | None, longest: int, model_type: str
) -> list[list[int]]:
    """Token ids of calibration texts, at most `length` each.

    A decoder's texts are joined and cut into sequences of this length: its keys depend on their positions, and short
    texts have none of the later ones.
    """
    causal = ARCHITECTURES[model_type].causal
    length = min(length or (1024 if causal else 512), longest)
    if not texts:
        return []
    if not causal:
        return tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    ids = list(chain.from_iterable(tokenizer(text, truncation=False)["input_ids"] for text in texts))
    ids = ids[: MAX_TOKENS + MAX_TOKENS % length]
    return [ids[begin : begin + length] for begin in range(0, len(ids), length)]


def default_texts(model: LinAttnPreTrainedModel, base: PreTrainedModel, tokenizer: Any) -> tuple[list[str], str, Any]:
    """Texts for what cannot start without data, what they are called, and the tokenizer; no texts if nothing needs any.

    A model without a tokenizer, or whose layers share one module, keeps its plain start, and a warning says so.
    """
    name = "Python's help texts"
    nothing: tuple[list[str], str, Any] = ([], "", tokenizer)
    if not any(has_closed_form(module) and module.config.far for _, module in model.linear_attentions()):
        return nothing
    try:
        check_calibration(model)
        tokenizer = tokenizer_of(base) if tokenizer is None else tokenizer
    except (OSError, ValueError) as error:
        logger.warning(f"Prototypes and features start at random, not from {name}: {error}")
        return nothing
    documents = load_documents(DataConfig(dataset=TOPICS, max_documents=DEFAULT_TEXTS))
    return [document.text for document in documents], name, tokenizer


def check_calibration(model: LinAttnPreTrainedModel) -> None:
    """Whether every converted layer has something that data can fit.

    Raises:
        ValueError: one has not; the message names the field.
    """
    settings = model.attention_config
    if ARCHITECTURES[model.config.base_model_type].shares_layers or getattr(settings, "sharing", None) == "layers":
        raise ValueError("calibration_texts: layers that share one module cannot be fitted one after the other.")
    fitted = [module for _, module in model.linear_attentions() if module.config.far]
    if not fitted:
        raise ValueError("calibration_texts: far=False in all layers leaves nothing to fit.")
    for module in fitted:
        if has_closed_form(module):
            continue
        if module.config.method == "performer":
            if module.config.feature_map != "learned":
                raise ValueError(
                    f"calibration_texts: feature_map={module.config.feature_map!r} has nothing that data could fit; it "
                    "must be 'learned'."
                )
        elif module.config.projection != "learned":
            # a fitted `conv` was no better than segment means on documents of other kinds
            raise ValueError(
                f"calibration_texts: projection={module.config.projection!r} is not fitted; it must be 'learned'."
            )


def has_closed_form(module: LinearAttention) -> bool:
    """Whether data are needed for a start that is found without training: moments, or prototypes of clusters."""
    prototypes = getattr(module.far_part, "prototypes", None)
    return getattr(module.config, "init", None) == "moments" or prototypes is not None


@torch.no_grad()
def _set_closed_form(module: LinearAttention, call: AttentionCall) -> None:
    query, key = (_real(x.float(), call.lengths) for x in (call.query, call.key))
    if module.config.method == "performer":
        module.far_part.feature_map.set_moments(match_moments(query, key))
        return
    # in the space of the keys themselves
    prototypes, key = module.far_part.prototypes, key / call.root
    centers = cluster_centers(key, prototypes.centers.shape[1])
    prototypes.centers.copy_(centers)
    # queries times the whole softmax scale
    prototypes.spread.copy_(logit_variances(query * call.root, key, centers))


def _fit(module: LinearAttention, call: AttentionCall) -> None:
    # heads that stay softmax have nothing to fit
    linear = call if module.split is None else call.of_heads(module.split.linear)
    if has_closed_form(module):
        _set_closed_form(module, linear)
        if getattr(module.config, "feature_map", None) == "learned":
            _train(module, call, _RATES["features"])
        return
    if module.config.method == "performer":
        center(module.far_part.feature_map, linear.query, linear.key, linear.lengths)
        _train(module, call, _RATES["features"])
    else:
        _train(module, call, _RATES["projection"])


@torch.no_grad()
def center(feature_map: FeatureMap, query: Tensor, key: Tensor, lengths: Tensor | None) -> None:
    """Start a `learned` feature map, as it comes from its seed, from the same estimate with less variance.

    Args:
        feature_map: changed in place; what it estimates, exp(q.k), stays the same.
        query, key: (batch, heads, length, head_dim), multiplied by the square root of the softmax scale.
        lengths: (batch,) number of real tokens per row; None where nothing is padded.
    """
    query, key = _real(query.float(), lengths), _real(key.float(), lengths)
    # (heads, 1, head_dim)
    nu, mu = query.mean(1, keepdim=True), key.mean(1, keepdim=True)
    spread = [(x - m).square().sum(-1).mean(-1)[:, None, None] for x, m in ((query, nu), (key, mu))]
    scale = (spread[1] / spread[0].clamp_min(1e-12)).clamp_min(1e-12) ** 0.25
    # (heads, features, head_dim); any precision of weights
    directions = feature_map.get_parameter("query_directions").float()
    # phi(a (q - nu)) exp(q.mu): written out, each term goes to what multiplies q, |q|^2 / 2 or nothing
    _set(feature_map, "query", scale * directions + scale**2 * nu + mu, scale**2)
    _set(feature_map, "key", directions / scale + mu / scale**2 + nu, scale**-2)
    for side, centre, factor in (("query", nu, scale), ("key", mu, 1 / scale)):
        offset = (
            -factor * (directions * centre).sum(-1, keepdim=True) - factor**2 * centre.square().sum(-1)[..., None] / 2
        )
        if side == "key":
            offset = offset - (nu * mu).sum(-1, keepdim=True)
        # (heads, features, 1) -> (heads, 1, features)
        getattr(feature_map, f"{side}_offset").copy_(offset.transpose(-1, -2))


def _set(feature_map: FeatureMap, side: str, directions: Tensor, square: Tensor) -> None:
    getattr(feature_map, f"{side}_directions").copy_(directions)
    getattr(feature_map, f"{side}_square").copy_(square)


def _real(x: Tensor, lengths: Tensor | None) -> Tensor:
    """(batch, heads, length, dim) -> (heads, real tokens, dim)."""
    if lengths is None:
        return x.transpose(0, 1).flatten(1, 2)
    real = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
    return x.transpose(1, 2)[real].transpose(0, 1)


def _train(module: LinearAttention, call: AttentionCall, rate: float) -> None:
    """Train the module's parameters on the relative error of its output; keep the best of start and end.

    `calibrate` has switched exact rows off: they have nothing to train.
    """
    dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
    # half precision would lose the small steps
    module.float()
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    compared = torch.arange(len(call.query))[:_COMPARED]
    with torch.no_grad():
        before = float(_error(module, call, compared))
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(module.config.seed)
    with torch.enable_grad():
        for step in range(STEPS):
            share = min((step + 1) / _WARMUP, 0.5 * (1 + math.cos(math.pi * step / STEPS)))
            optimizer.param_groups[0]["lr"] = rate * share
            rows = torch.randperm(len(call.query), generator=generator)[:BATCH_SIZE]
            optimizer.zero_grad()
            _error(module, call, rows).backward()
            optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        after = float(_error(module, call, compared))
    if not after < before:
        module.load_state_dict(start)
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])


def _error(module: LinearAttention, call: AttentionCall, rows: Tensor) -> Tensor:
    """|ours - softmax|^2 / |softmax|^2 over the real tokens of each of the rows, mean over the rows."""
    lengths = None if call.lengths is None else call.lengths[rows.to(call.lengths.device)]
    query, key, value, wanted = (x[rows].float() for x in (call.query, call.key, call.value, call.output))
    ours = module(query, key, value, lengths)
    error, size = (ours - wanted).square(), wanted.square()
    if lengths is not None:
        real = (torch.arange(wanted.shape[2], device=wanted.device) < lengths[:, None])[:, None, :, None]
        error, size = error * real, size * real
    return (error.sum((1, 2, 3)) / size.sum((1, 2, 3)).clamp_min(1e-30)).mean()
