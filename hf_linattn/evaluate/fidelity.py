"""How near each converted layer stays to the softmax attention that it replaces, on the same inputs.

The softmax model reads each document, and every converted layer is given what the same layer of the softmax
model was given, so that no layer answers for those before it. What is compared is the attention output before
its projection.

Two errors are told apart. With A the matrix of weights that the method puts on the keys, never formed when it
runs: the *approximation error* is that of A V against softmax(Q K^T) V, and the *re-association error* is that of
the output as it is computed, such as phi(Q) (phi(K)^T V), against A V: rounding alone. Rows of A are derivatives
of the output by the values, which is exact for every method: an output is linear in the values, or the greatest of
some, and so equals the sum of its derivatives times the values.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate.utils import tqdm
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..conversion.softmax import SoftmaxAttention
from ..modeling.architectures import ARCHITECTURES
from ..modeling.attention_interface import ATTENTION_NAME
from ..modeling.modeling_linattn import LinAttnPreTrainedModel, LinearAttention, position_offset, self_attentions
from ..modeling.validation import check_integer
from ..utils.hooks import hooked

# Weights that differ by no more than this share of the greatest one are as great.
_TIE = 1e-5
# A summary of these weighs each channel of the values in its own way.
_PER_CHANNEL = ("max", "conv")


@dataclass(frozen=True, kw_only=True)
class LayerFidelity:
    """One converted layer, over all documents.

    Attributes:
        layer: index of the layer, from 0.
        relative_error: |o_linear - o_softmax| / |o_softmax|, Frobenius norms over all tokens and heads.
        cosine: of the two outputs of a token, all heads together; mean over tokens.
        agreement: how often the most attended key is the one that softmax attends to most; where several are
            attended to alike, as the tokens of one summary are, the chance that one of them drawn at random is it.
        near_mass: share of softmax attention that falls on keys that the exact branch has.
        reassociation_error: relative error of the output against its own weights times the values: rounding.
        approximation_error: relative error of the weights times the values against softmax: features, summaries.
        head_relative_error, head_cosine: the same of each head alone.

    The middle four are means over sampled queries.
    """

    layer: int
    relative_error: float
    cosine: float
    agreement: float
    near_mass: float
    reassociation_error: float
    approximation_error: float
    head_relative_error: tuple[float, ...]
    head_cosine: tuple[float, ...]


class _Attention(NamedTuple):
    """Queries and keys, multiplied by the square root of the scale, values and output: (1, heads, length, dim)."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


def fidelity(
    base: nn.Module,
    converted: nn.Module,
    documents: Sequence[Sequence[int]],
    *,
    queries: int = 64,
    seed: int = 0,
) -> list[LayerFidelity]:
    """Compare every converted layer with the softmax layer that it replaces. Memory grows linearly with the length.

    Args:
        base: the softmax model, with room for the documents (`hf_linattn.conversion.convert.extend_positions`).
        converted: its conversion, which may carry a PEFT adapter, on the same device and in the same dtype; its own
            weights of queries, keys and values are used.
        documents: token ids of each, without padding.
        queries: how many queries of each document are drawn for what needs their weights on all keys.
        seed: seed of that draw.

    Returns:
        One entry per converted layer, first layer first; layers that stayed softmax have none.

    Raises:
        ValueError: the models do not belong together, a document is empty or longer than a model takes, or there
            is none.
    """
    linear_model: Any = converted.get_base_model() if isinstance(converted, PeftModel) else converted
    if not isinstance(base, PreTrainedModel) or not isinstance(linear_model, LinAttnPreTrainedModel):
        raise ValueError(
            f"base is a {type(base).__name__} and converted a {type(linear_model).__name__}; they must be a model of "
            "Transformers and its conversion."
        )
    _check(base, linear_model, documents, queries)
    sums: dict[int, _Sums] = {}
    modes = base.training, converted.training
    base.eval()
    converted.eval()
    draw = random.Random(seed)
    try:
        for document in tqdm(documents, desc="Fidelity", unit="document", leave=False):
            positions = torch.tensor(sorted(draw.sample(range(len(document)), min(queries, len(document)))))
            with _compared(base, linear_model, positions.to(base.device), sums):
                _read(base, document)
    finally:
        base.train(modes[0])
        converted.train(modes[1])
    return [sums[layer].result(layer) for layer in sorted(sums)]


def _check(
    base: PreTrainedModel, converted: LinAttnPreTrainedModel, documents: Sequence[Sequence[int]], queries: int
) -> None:
    if base.config.model_type != converted.config.base_model_type:
        raise ValueError(
            f"base has model_type={base.config.model_type!r}, and converted was made from "
            f"{converted.config.base_model_type!r}."
        )
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if getattr(base.config, name) != getattr(converted.config, name):
            raise ValueError(
                f"base has {name}={getattr(base.config, name)}, and converted {getattr(converted.config, name)}."
            )
    if (base.device, base.dtype) != (converted.device, converted.dtype):
        raise ValueError(
            f"base is {base.dtype} on {base.device}, and converted {converted.dtype} on {converted.device}; they must "
            "be the same."
        )
    check_integer("fidelity", "queries", queries, 1)
    if not documents or not all(len(document) for document in documents):
        raise ValueError("documents is empty, or holds a document without a token.")
    longest = max(len(document) for document in documents)
    limits = {"converted": converted.attention_config.max_length}
    if ARCHITECTURES[base.config.model_type].position_table is not None:
        limits["base"] = base.config.max_position_embeddings - position_offset(base.config)
    for name, limit in limits.items():
        if limit is not None and longest > limit:
            raise ValueError(f"A document has {longest} tokens, and {name} takes at most {limit}.")


def _read(base: PreTrainedModel, document: Sequence[int]) -> None:
    without_cache = {"use_cache": False} if ARCHITECTURES[base.config.model_type].causal else {}
    with torch.no_grad():
        base.base_model(input_ids=torch.tensor([list(document)], device=base.device), **without_cache)


@contextmanager
def _compared(
    base: PreTrainedModel, converted: LinAttnPreTrainedModel, positions: Tensor, sums: dict[int, "_Sums"]
) -> Iterator[None]:
    """While this lasts, each attention layer of `base` that runs is compared, and `sums` collects the results."""
    architecture = ARCHITECTURES[base.config.model_type]
    calls: list[_Attention] = []
    # of calls, not of modules: one module may serve several layers
    layers = count()

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        query, key, value = args[:3]
        # half of the scale to each side; the measurement's own calls have none
        root = kwargs.get("scale", 1.0) ** 0.5
        calls.append(_Attention(query * root, key * root, value, output))

    def compare(theirs: nn.Module, linear: LinearAttention | None) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            layer = next(layers)
            if linear is None:
                return
            theirs(*args, **kwargs)
            softmax, ours = calls
            if layer not in sums:
                sums[layer] = _Sums(heads=ours.query.shape[1])
            sums[layer].add(softmax, ours, linear, positions, causal=architecture.causal)
            # with what the measurement itself ran
            calls.clear()

        return hook

    watched = []
    implementation = base.config._attn_implementation
    try:
        base.set_attn_implementation(ATTENTION_NAME)
        pairs = zip(self_attentions(base, architecture), self_attentions(converted, architecture), strict=True)
        # short rows too by linear attention: that is what is measured
        with hooked() as handles, converted.branches(exact=False):
            for (_, ours), (_, theirs) in pairs:
                linear: Any = getattr(theirs, "linattn", None)
                if linear is not None:
                    ours.linattn = SoftmaxAttention(is_causal=architecture.causal)
                    watched.append(ours)
                    handles += [x.register_forward_hook(keep, with_kwargs=True) for x in (ours.linattn, linear)]
                handles.append(ours.register_forward_hook(compare(theirs, linear), with_kwargs=True))
            yield
    finally:
        for attention in watched:
            del attention.linattn
        base.set_attn_implementation(implementation)


class _Sums:
    """What the fields of `LayerFidelity` are made from, added up over documents."""

    def __init__(self, *, heads: int) -> None:
        self.tokens = self.rows = 0
        self.cosine = self.agreement = self.near_mass = 0.0
        # squares: of the error and of softmax per head, and of what the sampled queries tell
        self.error, self.size, self.head_cosine = (torch.zeros(heads, dtype=torch.float64) for _ in range(3))
        self.reassociation, self.weighted, self.approximation, self.sampled = (0.0 for _ in range(4))

    def add(
        self, softmax: _Attention, ours: _Attention, linear: LinearAttention, positions: Tensor, *, causal: bool
    ) -> None:
        """One document. `softmax` is the base's attention, `ours` that of `linear`; `positions` (queries,)."""
        target, output = softmax.output[0].double(), ours.output[0].double()
        self.error += (output - target).square().sum((1, 2)).cpu()
        self.size += target.square().sum((1, 2)).cpu()
        # (heads, length, dim), and all heads of a token as one vector: (length, heads * dim)
        self.head_cosine += F.cosine_similarity(output, target, dim=-1).sum(-1).cpu()
        tokens, target_tokens = (x.transpose(0, 1).flatten(1) for x in (output, target))
        self.cosine += float(F.cosine_similarity(tokens, target_tokens, dim=-1).sum())
        self.tokens += output.shape[1]

        exact = _softmax_weights(softmax, positions, causal=causal)
        weights = _weights(linear, ours.query, ours.key, ours.value, positions)
        top = exact >= exact.amax(-1, keepdim=True) * (1 - _TIE)
        greatest = weights.amax(-1, keepdim=True)
        ours_top = weights >= greatest - _TIE * greatest.abs()
        self.agreement += float(((top & ours_top).sum(-1) / ours_top.sum(-1)).sum())
        near = _near(linear, ours, positions, causal=causal)
        if near is not None:
            self.near_mass += float((exact * near).sum())
        self.rows += exact.shape[0] * exact.shape[1]

        # (heads, queries, dim)
        weighted = weights.double() @ ours.value[0].double()
        outputs = [weighted, output[:, positions], target[:, positions]]
        if getattr(linear.config, "projection", None) in _PER_CHANNEL:
            # the weights of a query are those of one channel
            channel = _channels(positions, weighted.shape[-1])[None, :, None].expand(len(weighted), -1, 1)
            outputs = [x.gather(-1, channel) for x in outputs]
        weighted, output, target = outputs
        self.reassociation += float((output - weighted).square().sum())
        self.weighted += float(weighted.square().sum())
        self.approximation += float((weighted - target).square().sum())
        self.sampled += float(target.square().sum())

    def result(self, layer: int) -> LayerFidelity:
        return LayerFidelity(
            layer=layer,
            relative_error=_ratio(float(self.error.sum()), float(self.size.sum())),
            cosine=self.cosine / self.tokens,
            agreement=self.agreement / self.rows,
            near_mass=self.near_mass / self.rows,
            reassociation_error=_ratio(self.reassociation, self.weighted),
            approximation_error=_ratio(self.approximation, self.sampled),
            head_relative_error=tuple(map(_ratio, self.error.tolist(), self.size.tolist())),
            head_cosine=tuple((self.head_cosine / self.tokens).tolist()),
        )


def _ratio(error: float, size: float) -> float:
    """Of norms, from their squares."""
    return (error / max(size, 1e-300)) ** 0.5


def _softmax_weights(attention: _Attention, positions: Tensor, *, causal: bool) -> Tensor:
    """Softmax of the queries at `positions` over all keys, (heads, queries, length), float32."""
    logits = attention.query[0, :, positions].float() @ attention.key[0].float().transpose(-1, -2)
    if causal:
        later = torch.arange(logits.shape[-1], device=logits.device) > positions[:, None]
        logits = logits.masked_fill(later, float("-inf"))
    return logits.softmax(-1)


def _channels(positions: Tensor, dim: int) -> Tensor:
    """Which channel of its output each of the queries is asked for, (queries,)."""
    return torch.arange(len(positions), device=positions.device) % dim


def _weights(linear: LinearAttention, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    """What the outputs at `positions` weigh the values with, (heads, queries, length), float32.

    The derivative of one output channel of a query is by the same channel of all values; as many queries as there
    are channels, each on its own, are asked for in one backward pass.
    """
    leaf = value.detach().float().requires_grad_()
    with torch.enable_grad():
        output = linear(query.float(), key.float(), leaf)
    rows = []
    for chosen in positions.split(value.shape[-1]):
        channel = _channels(chosen, value.shape[-1])
        asked = torch.zeros_like(output)
        asked[0, :, chosen, channel] = 1.0
        (derivative,) = torch.autograd.grad(output, leaf, asked, retain_graph=True)
        # (1, heads, length, channels) -> (heads, queries, length)
        rows.append(derivative[0, ..., channel].transpose(-1, -2))
    return torch.cat(rows, dim=1)


def _near(linear: LinearAttention, attention: _Attention, positions: Tensor, *, causal: bool) -> Tensor | None:
    """Which keys the exact branch has for the queries at `positions`, (heads, queries, length); None without one."""
    config = linear.config
    # without a window, a causal Linformer still has the query's own segment exactly
    own_segment = causal and config.method == "linformer"
    if not (linear.near and (config.window_size or config.global_tokens or own_segment)):
        return None
    far, linear.far = linear.far, False
    try:
        # with queries and keys of zeros all weights are the same
        nothing = torch.zeros_like(attention.query), torch.zeros_like(attention.key)
        return _weights(linear, *nothing, attention.value, positions) > 0
    finally:
        linear.far = far
