"""One pass over documents: what each attention layer is like, and what each setting would cost and lose in it."""

import dataclasses
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import tqdm
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from ..conversion.convert import checked_texts, converted_config, full_layers
from ..conversion.flops import linear_flops, linear_layers_flops, softmax_flops
from ..conversion.positions import extend_positions
from ..conversion.softmax import AttentionCall, SoftmaxAttention, watch_attention
from ..data.tokenizers import tokenizer_of
from ..modeling.architectures import ARCHITECTURES
from ..modeling.configuration_linattn import AttentionConfig, LayerwiseConfig, PerformerConfig
from ..modeling.modeling_linattn import LinearAttention, linear_attention, sliding_layers
from ..utils.labels import checkpoint_name
from .config import AnalyzeConfig, candidates_for
from .cost import Cost, measure
from .retrieval import planted_examples, retrieval_scores
from .spectra import HeadStatistics, LayerStatistics, LayerSums

#: Raised when a field changes its meaning.
FORMAT_VERSION = 1
# More than a token of prose has.
_CHARACTERS_PER_TOKEN = 6


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings that were tried in every layer, without training.

    Attributes:
        cost: of one attention layer.
        errors: relative error |ours - softmax| / |softmax| of the output, by layer and head.
        loss: what the whole model loses with these settings in one layer alone, by layer; see `Analysis.measure`.
        uniform_loss: the same with these settings in all layers at once.
    """

    name: str
    settings: AttentionConfig
    cost: Cost
    errors: tuple[tuple[float, ...], ...]
    loss: tuple[float, ...]
    uniform_loss: float


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What `analyze` found.

    Attributes:
        model: Hub id of the checkpoint, or the name of its folder.
        measure: how a loss is told: "1 - cosine of the pooled embedding" (encoders) or "KL divergence of the next
            token in nats" (decoders), mean over documents.
        length, documents: tokens of the longest document, and how many were read.
        softmax: cost of one softmax attention layer at that length.
        rest: cost of the whole model but its attention layers; its memory is not known, and 0.
        retrieval: retrieval score of each head, by layer; empty if none was asked for.
        left_out: indices of the layers with a sliding window, which cannot be converted. The fields by layer have the
            other layers in their order; `indices` gives their indices in the model.
    """

    model: str
    model_type: str
    heads: int
    head_dim: int
    measure: str
    length: int
    documents: int
    config: AnalyzeConfig
    statistics: tuple[LayerStatistics, ...]
    candidates: tuple[Candidate, ...]
    softmax: Cost
    rest: Cost
    retrieval: tuple[tuple[float, ...], ...] = ()
    left_out: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        """How many attention layers can be converted."""
        return len(self.statistics)

    @property
    def indices(self) -> list[int]:
        """Their indices in the model."""
        return [layer.layer for layer in self.statistics]

    @property
    def names(self) -> list[str]:
        """Names of the candidates."""
        return [candidate.name for candidate in self.candidates]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        values = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        for plain, candidate in zip(values["candidates"], self.candidates, strict=True):
            plain["settings"] = candidate.settings.to_dict()
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Analysis":
        """The inverse of `to_dict`.

        Raises:
            ValueError: the values are those of a newer version.
        """
        values = dict(values)
        if (version := values.pop("format_version", None)) != FORMAT_VERSION:
            raise ValueError(f"format_version={version!r} of an analysis; this hf-linattn reads {FORMAT_VERSION}.")
        values |= {"softmax": Cost(**values["softmax"]), "rest": Cost(**values["rest"])}
        values["config"] = AnalyzeConfig(**values["config"])
        values["retrieval"] = tuple(tuple(heads) for heads in values.get("retrieval", ()))
        values["left_out"] = tuple(values.get("left_out", ()))
        values["statistics"] = tuple(
            LayerStatistics(
                **_with_tuples({**layer, "heads": [HeadStatistics(**_with_tuples(head)) for head in layer["heads"]]})
            )
            for layer in values["statistics"]
        )
        values["candidates"] = tuple(
            Candidate(
                **_with_tuples(
                    {
                        **candidate,
                        "settings": AttentionConfig.from_dict(candidate["settings"]),
                        "cost": Cost(**candidate["cost"]),
                        "errors": [tuple(heads) for heads in candidate["errors"]],
                    }
                )
            )
            for candidate in values["candidates"]
        )
        return Analysis(**values)

    @staticmethod
    def load(path: str | Path) -> "Analysis":
        """Read an analysis.json, or the folder that has one.

        Raises:
            ValueError: the file is damaged, of something else, or of a newer version.
        """
        path = Path(path)
        path = path / "analysis.json" if path.is_dir() else path
        try:
            return Analysis.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{str(path)!r} is no analysis that this hf-linattn reads: {error}") from error


def analyze(
    model: str | Path | PreTrainedModel,
    texts: Sequence[str],
    config: AnalyzeConfig | None = None,
    *,
    candidates: Mapping[str, AttentionConfig] | None = None,
    tokenizer: Any = None,
    operations: float | None = None,
    **from_pretrained_kwargs: Any,
) -> Analysis:
    """Look at every attention layer of a softmax checkpoint, and try settings in each, without training.

    Documents are read one at a time, and of each one layer at a time, so that memory does not grow with their
    number. Nothing larger than one head's matrix of `spectrum_length` squared is held.

    Args:
        model: a Hub id, a folder, or a loaded model; an encoder's embedding is the mean over its tokens.
        texts: documents; `config.documents` of them are read, drawn of those that are long enough, or else the longest.
        config: default: `AnalyzeConfig()`.
        candidates: name -> settings to try. Default: `CANDIDATES`, or of a decoder `DECODER_CANDIDATES`.
        tokenizer: for a loaded model. Default: the checkpoint's.
        operations: a budget that `suggest` will be given. Operations are counted, and one that no candidate keeps to
            is refused before the documents are read.
        from_pretrained_kwargs: for an id or folder, passed on to `from_pretrained`.

    Raises:
        ValueError: the architecture is not supported, no text is left, or `operations` cannot be had.
    """
    config = AnalyzeConfig() if config is None else config
    base, documents, tokenizer = _prepared(model, texts, config, tokenizer, from_pretrained_kwargs)
    candidates = candidates_for(base.config.model_type) if candidates is None else candidates
    training = base.training
    try:
        analyzer = _Analyzer(base.eval(), documents, config, candidates)
        if operations is not None:
            analyzer.check_operations(operations)
        planted = []
        if config.retrieval_texts:
            planted = planted_examples(
                texts,
                tokenizer,
                causal=analyzer.causal,
                length=analyzer.length,
                count=config.retrieval_texts,
                seed=config.seed,
            )
        scores = retrieval_scores(analyzer.base, planted)
        kept = tuple(scores[layer] for layer in analyzer.full) if scores else ()
        return dataclasses.replace(analyzer.run(), retrieval=kept, left_out=tuple(analyzer.sliding))
    finally:
        base.train(training)


def _prepared(
    model: str | Path | PreTrainedModel,
    texts: Sequence[str],
    config: AnalyzeConfig,
    tokenizer: Any,
    from_pretrained_kwargs: dict[str, Any],
) -> tuple[PreTrainedModel, list[list[int]], Any]:
    """The softmax model with room for the documents, their token ids, and the tokenizer."""
    base = model if isinstance(model, PreTrainedModel) else _load(str(model), from_pretrained_kwargs)
    if tokenizer is None:
        tokenizer = tokenizer_of(base)
    documents = tokenized(texts, tokenizer, config.length, config.documents, config.seed)
    length = max(len(document) for document in documents)
    return extend_positions(base, length, position_extension=config.position_extension), documents, tokenizer


def tokenized(texts: Sequence[str], tokenizer: Any, length: int, count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` texts, each cut to `length` tokens: drawn of those that fill it, or else the longest.

    Raises:
        TypeError: `texts` is one string, or holds what is none.
        ValueError: there is no text.
    """
    chosen = sorted((text for text in checked_texts(texts, "texts") if text.strip()), key=len, reverse=True)
    if not chosen:
        raise ValueError("texts holds no text.")
    filling = [text for text in chosen if len(text) >= _CHARACTERS_PER_TOKEN * length]
    chosen = random.Random(seed).sample(filling, count) if len(filling) >= count else chosen[:count]
    # what is cut off before the tokenizer would be cut off after it
    texts = [text[: 4 * _CHARACTERS_PER_TOKEN * length] for text in chosen]
    return tokenizer(texts, truncation=True, max_length=length, verbose=False)["input_ids"]


def _load(model_id: str, kwargs: dict[str, Any]) -> PreTrainedModel:
    model_type = AutoConfig.from_pretrained(model_id, **{k: v for k, v in kwargs.items() if k != "dtype"}).model_type
    # what a decoder loses shows in its logits
    causal = model_type in ARCHITECTURES and ARCHITECTURES[model_type].causal
    return (AutoModelForCausalLM if causal else AutoModel).from_pretrained(model_id, **kwargs)


class SwappedModel:
    """A softmax model whose attention layers can be told to use candidates, without converting it.

    Args:
        base: with room for `length` tokens, in eval mode.
        candidates: name -> settings.
    """

    def __init__(self, base: PreTrainedModel, config: AnalyzeConfig, candidates: Mapping[str, AttentionConfig]) -> None:
        self.base, self.config = base, config
        self.causal = ARCHITECTURES[base.config.model_type].causal
        # indices in the model; layers with a sliding window stay as they are
        self.full, self.sliding = full_layers(base.config), sliding_layers(base.config)
        self.layers = len(self.full)
        self.settings: dict[str, AttentionConfig] = {}
        self.modules: dict[str, list[LinearAttention]] = {}
        self.converted: dict[str, Any] = {}
        if not candidates:
            raise ValueError("candidates is empty: there is nothing to try.")
        for name, settings in candidates.items():
            if settings.layers is not None:
                raise ValueError(
                    f"candidates[{name!r}].layers={settings.layers} must not be set: every layer is tried."
                )
            if settings.softmax_heads is not None:
                raise ValueError(
                    f"candidates[{name!r}].softmax_heads={settings.softmax_heads} must not be set: `suggest` chooses "
                    "heads for what it suggests."
                )
            self.settings[name] = dataclasses.replace(settings, seed=config.seed, max_length=None)
            # short rows too by linear attention: that is what is tried
            linear = dataclasses.replace(self.settings[name], exact_length=0)
            self.converted[name] = converted = converted_config(base.config, linear, config.max_length)

            def make(layer: int, converted: Any = converted) -> LinearAttention:
                return linear_attention(converted.attention, converted, layer).to(base.device, base.dtype)

            # random features are each layer's own; projections start alike, and take memory
            performer = isinstance(settings, PerformerConfig)
            self.modules[name] = [make(layer) for layer in self.full] if performer else [make(0)] * self.layers

    def attention(self, name: str, call: AttentionCall) -> Tensor:
        """What a candidate gives in the place of a layer's softmax attention."""
        module = self.modules[name][call.layer]
        return module(call.query, call.key, call.value, call.lengths)

    def outcome(self, ids: Tensor, visit: Callable[[AttentionCall], Tensor | None]) -> Tensor:
        """The pooled embedding (dim,), or log-probabilities of the next token (length, vocabulary).

        `visit` is called with the layers that see every token, numbered as in `full`.
        """
        places = {layer: place for place, layer in enumerate(self.full)}

        def visit_full(call: AttentionCall) -> Tensor | None:
            if call.layer not in places:
                return None
            call.layer = places[call.layer]
            return visit(call)

        with torch.no_grad(), watch_attention(self.base, visit_full):
            if self.causal:
                return self.base(ids, use_cache=False).logits[0].float().log_softmax(-1)
            return self.base.base_model(ids).last_hidden_state[0].float().mean(0)

    def swapped(
        self, ids: Tensor, names: Sequence[str | None], softmax_heads: Mapping[int, list[int]] | None = None
    ) -> Tensor:
        """The outcome with the candidates of these names in the layers, first layer first; None is softmax."""

        def visit(call: AttentionCall) -> Tensor | None:
            name, exact = names[call.layer], (softmax_heads or {}).get(call.layer, [])
            if name is None:
                return None
            out = self.attention(name, call)
            out[:, exact] = call.output[:, exact].to(out.dtype)
            return out

        return self.outcome(ids, visit)

    def loss(self, wanted: Tensor, found: Tensor) -> float:
        """How far an outcome is from the softmax model's; see `Analysis.measure`."""
        if self.causal:
            return float((wanted.exp() * (wanted - found)).sum(-1).mean())
        return float(1 - F.cosine_similarity(wanted.double(), found.double(), dim=0))


class Check:
    """Measures choices of candidates in the whole model, for `suggest`.

    Args:
        model, texts, tokenizer, from_pretrained_kwargs: as in `analyze`. The documents may be the same, or others.
        analysis: whose candidates are chosen from, and whose config says how many documents of what length are read.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        texts: Sequence[str],
        analysis: Analysis,
        *,
        tokenizer: Any = None,
        **from_pretrained_kwargs: Any,
    ) -> None:
        candidates = {candidate.name: candidate.settings for candidate in analysis.candidates}
        base, documents, _ = _prepared(model, texts, analysis.config, tokenizer, from_pretrained_kwargs)
        self.model = SwappedModel(base.eval(), analysis.config, candidates)
        self._inputs = [torch.tensor([document], device=base.device) for document in documents]
        self._wanted = [self.model.swapped(ids, [None] * self.model.layers) for ids in self._inputs]

    def __call__(self, names: Sequence[str | None], softmax_heads: Mapping[int, list[int]] | None = None) -> float:
        """The loss of the whole model, mean over documents."""
        pairs = zip(self._wanted, self._inputs, strict=True)
        losses = [self.model.loss(wanted, self.model.swapped(ids, names, softmax_heads)) for wanted, ids in pairs]
        return sum(losses) / len(losses)


class _Analyzer(SwappedModel):
    def __init__(
        self,
        base: PreTrainedModel,
        documents: list[list[int]],
        config: AnalyzeConfig,
        candidates: Mapping[str, AttentionConfig],
    ) -> None:
        super().__init__(base, config, candidates)
        self.documents, self.length = documents, max(len(document) for document in documents)

    def run(self) -> Analysis:
        sums = [
            LayerSums(
                layer,
                causal=self.causal,
                window_sizes=tuple(self.config.window_sizes),
                spectrum_length=min(self.config.spectrum_length, self.length),
                feature_error=self.config.feature_error,
            )
            for layer in self.full
        ]
        names = list(self.settings)
        # squares of errors (candidates, layers, heads) and of softmax (layers, heads)
        errors: Any = 0.0
        sizes: Any = 0.0
        loss = torch.zeros(len(names), self.layers, dtype=torch.float64)
        together = torch.zeros(len(names), dtype=torch.float64)
        shape: tuple[int, ...] = ()
        rounds = len(self.documents) * (1 + len(names) * (self.layers + 1))
        bar = tqdm(total=rounds, desc="Analyzing", unit="pass", leave=False)
        for document in self.documents:
            ids = torch.tensor([document], device=self.base.device)
            found: list[tuple[Tensor, Tensor]] = []

            def look(call: AttentionCall, found: Any = found) -> None:
                nonlocal shape
                shape = tuple(call.query.shape)
                sums[call.layer].add(call.query[0], call.key[0])
                wanted = call.output[0].double()
                apart = [(self.attention(name, call)[0].double() - wanted).square().sum((1, 2)) for name in names]
                found.append((torch.stack(apart).cpu(), wanted.square().sum((1, 2)).cpu()))

            wanted = self.outcome(ids, look)
            error, size = torch.stack([x for x, _ in found], 1), torch.stack([x for _, x in found])
            errors, sizes = errors + error, sizes + size
            bar.update(1)
            for index, name in enumerate(names):
                for layer in range(self.layers):
                    alone = [name if layer == other else None for other in range(self.layers)]
                    loss[index, layer] += self.loss(wanted, self.swapped(ids, alone))
                    bar.update(1)
                together[index] += self.loss(wanted, self.swapped(ids, [name] * self.layers))
                bar.update(1)
        bar.close()
        relative = (errors / sizes.clamp_min(1e-300)).sqrt()
        softmax, costs, rest = self._costs(shape)
        count = len(self.documents)
        return Analysis(
            model=checkpoint_name(self.base.config.name_or_path),
            model_type=self.base.config.model_type,
            heads=shape[1],
            head_dim=shape[3],
            measure="KL divergence of the next token in nats" if self.causal else "1 - cosine of the pooled embedding",
            length=self.length,
            documents=count,
            config=self.config,
            statistics=tuple(layer.result() for layer in sums),
            candidates=tuple(
                Candidate(
                    name=name,
                    settings=self.settings[name],
                    cost=costs[name],
                    errors=tuple(tuple(heads) for heads in relative[index].tolist()),
                    loss=tuple((loss[index] / count).tolist()),
                    uniform_loss=float(together[index] / count),
                )
                for index, name in enumerate(names)
            ),
            softmax=softmax,
            rest=rest,
        )

    def check_operations(self, limit: float) -> None:
        """Whether some candidates take at most this part of softmax's operations.

        Raises:
            ValueError: none does; the message tells the least.
        """
        softmax, candidates, rest = self._operations()
        name = min(candidates, key=lambda name: candidates[name])
        least = (rest + self.layers * candidates[name]) / (rest + self.layers * softmax)
        if least > limit:
            raise ValueError(
                f"operations={limit} cannot be had at {self.length:,} tokens: the candidate with the fewest, {name!r}, "
                f"takes {least:.3f} of softmax's operations in all layers. Give at least that, longer documents "
                "(length), or other candidates."
            )

    def _operations(self) -> tuple[float, dict[str, float], float]:
        """Of one softmax layer, of one layer of each candidate, and of all that is not attention."""
        reference: Any = self.converted[next(iter(self.converted))]
        candidates = {
            name: linear_flops(converted.attention, converted, self.length)
            for name, converted in self.converted.items()
        }
        with torch.no_grad():
            rest = linear_layers_flops(self.base.base_model, self._forward)
        if self.sliding:
            rest += len(self.sliding) * softmax_flops(reference, self.length, reference.sliding_window)
        return softmax_flops(reference, self.length), candidates, rest

    def _forward(self) -> Any:
        """The model without its head on the longest document."""
        ids = torch.tensor([max(self.documents, key=len)], device=self.base.device)
        body: Any = self.base.base_model
        return body(ids, **({"use_cache": False} if self.causal else {}))

    def _costs(self, shape: tuple[int, ...]) -> tuple[Cost, dict[str, Cost], Cost]:
        device = self.base.device
        generator = torch.Generator("cpu").manual_seed(self.config.seed)
        query, key, value = (
            torch.randn((1, shape[1], self.length, shape[3]), generator=generator).to(device, self.base.dtype)
            for _ in range(3)
        )
        of_softmax, of_candidates, of_rest = self._operations()
        exact = SoftmaxAttention(is_causal=self.causal)
        softmax = measure(lambda: exact(query, key, value, None), device, of_softmax)
        costs = {}
        for name, modules in self.modules.items():
            module = modules[0]
            costs[name] = measure(partial(module, query, key, value), device, of_candidates[name])
        whole = measure(self._forward, device, of_rest)
        # what the layers' attention takes of the whole is known from its own measurement
        rest = Cost(time=max(whole.time - self.layers * softmax.time, 0.0), memory=0.0, operations=of_rest)
        return softmax, costs, rest


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where the fields are tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def settings_by_layer(
    analysis: Analysis, names: Sequence[str | None], softmax_heads: Mapping[int, list[int]] | None = None
) -> LayerwiseConfig:
    """The config with the candidate of that name in each layer; None for layers that stay softmax.

    Raises:
        ValueError: no layer is converted.
    """
    by_name, indices = {candidate.name: candidate.settings for candidate in analysis.candidates}, analysis.indices
    return LayerwiseConfig(
        by_layer={x: by_name[name] for x, name in zip(indices, names, strict=True) if name is not None},
        max_length=analysis.config.max_length,
        seed=analysis.config.seed,
        softmax_heads={indices[x]: heads for x, heads in (softmax_heads or {}).items() if names[x] is not None} or None,
    )
