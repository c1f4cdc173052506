"""One model of a comparison at work: loaded when it is first needed; its embeddings are kept."""

import gc
import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from ..utils.files import replacing
from .batches import mean_pooled, run_batches
from .models import ComparedModel, base_length, fingerprint, load_model

Result = TypeVar("Result")
POOLINGS = ("mean", "cls")
# embeddings are written to disk each time that this many tokens were read
_PORTION = 200_000


class Runner:
    """Runs one model of a comparison, of one of its seeds, over documents.

    Args:
        compared: what to run.
        base: id or folder of the softmax checkpoint.
        seed: which of its sources.
        auto_class: the head.
        max_length: longest document in tokens.
        batch_tokens: most tokens of one batch.
        pad_token_id: of the tokenizer.
        special_tokens: token ids that the tokenizer puts before and after a text.
        folder: where embeddings are kept.
        position_extension, dtype: as in `load_model`.
    """

    def __init__(
        self,
        compared: ComparedModel,
        base: str,
        *,
        seed: int,
        auto_class: str,
        max_length: int,
        batch_tokens: int,
        pad_token_id: int | None,
        special_tokens: tuple[list[int], list[int]] = ([], []),
        folder: Path,
        position_extension: str = "repeat",
        dtype: str | None = None,
    ) -> None:
        self.compared, self.base, self.seed = compared, base, seed
        self._options: dict[str, Any] = {
            "auto_class": auto_class,
            "max_length": max_length,
            "position_extension": position_extension,
            "dtype": dtype,
        }
        self._batch_tokens, self._pad_token_id, self._folder = batch_tokens, pad_token_id, folder
        self._special_tokens = special_tokens
        self._model: nn.Module | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens that the model reads of a document: its own length if it is truncated, else no limit."""
        return base_length(self.base) if self.compared.kind == "truncated" else None

    @cached_property
    def key(self) -> str:
        """Changes when what this model computes changes."""
        options = "" if self.compared.has_own_length else str(sorted(self._options.items()))
        options += str(self._options["dtype"])
        return fingerprint(self.compared, self.base, self.seed) + hashlib.sha256(options.encode()).hexdigest()[:8]

    @property
    def model(self) -> nn.Module:
        """The model, on this process's device."""
        if self._model is None:
            loaded = load_model(self.compared, self.base, seed=self.seed, **self._options)
            self._model = loaded.to(PartialState().device)
        return self._model

    def unload(self) -> None:
        """Give the model's memory back; it is loaded again when it is needed."""
        if self._model is None:
            # a collection takes longer than a small model's forward pass
            return
        self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run(
        self,
        documents: Sequence[Sequence[int]],
        read: Callable[[nn.Module, Tensor, Tensor, list[int]], list[Result]],
    ) -> list[Result]:
        """`run_batches` of this model."""
        return run_batches(
            self.model,
            documents,
            read,
            batch_tokens=self._batch_tokens,
            pad_token_id=self._pad_token_id,
            desc=self.compared.name,
        )

    def embed(self, documents: Sequence[Sequence[int]], pooling: str) -> np.ndarray:
        """Embeddings (documents, dim) of token ids, float32; each document is read once, and its embedding kept.

        Softmax in chunks averages the embeddings of a document's chunks, each with the weight of its tokens.

        Args:
            documents: token ids of each, special tokens included.
            pooling: "mean" over valid tokens, or "cls", the first token.
        """
        if self.compared.kind == "chunks":
            own = base_length(self.base)
            parts = [in_chunks(document, own, self._special_tokens) for document in documents]
            embeddings = self._embed([chunk for chunks in parts for chunk in chunks], pooling)
            tokens = np.array([len(chunk) for chunks in parts for chunk in chunks], dtype=np.float32)
            starts = np.cumsum([0, *(len(chunks) for chunks in parts[:-1])])
            totals = np.add.reduceat(embeddings * tokens[:, None], starts)
            return totals / np.add.reduceat(tokens, starts)[:, None]
        return self._embed(documents, pooling)

    def _embed(self, documents: Sequence[Sequence[int]], pooling: str) -> np.ndarray:
        path = self._folder / f"{self.key}.safetensors"
        kept: dict[str, np.ndarray] = load_file(path) if path.is_file() else {}
        names = [_name(document, pooling) for document in documents]
        missing = {name: document for name, document in zip(names, documents, strict=True) if name not in kept}

        def read(model: nn.Module, ids: Tensor, mask: Tensor, indices: list[int]) -> list[np.ndarray]:
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state
            pooled = mean_pooled(states, mask) if pooling == "mean" else states[:, 0].float()
            return list(pooled.cpu().numpy())

        for portion in _portions(list(missing.items())):
            embeddings = self.run([document for _, document in portion], read)
            kept |= {name: embedding for (name, _), embedding in zip(portion, embeddings, strict=True)}
            if PartialState().is_main_process:
                _save(kept, path)
        PartialState().wait_for_everyone()
        return np.stack([kept[name] for name in names])


def in_chunks(document: Sequence[int], length: int, special_tokens: tuple[list[int], list[int]]) -> list[list[int]]:
    """A document as consecutive chunks of at most `length` tokens, each with the special tokens.

    One that fits is left as it is.

    Raises:
        ValueError: the special tokens leave no room.
    """
    if len(document) <= length:
        return [list(document)]
    before, after = special_tokens
    text = document[len(before) : len(document) - len(after)]
    room = length - len(before) - len(after)
    if room < 1:
        raise ValueError(f"{len(before) + len(after)} special tokens leave no room in chunks of {length} tokens.")
    return [[*before, *text[start : start + room], *after] for start in range(0, len(text), room)]


def _name(document: Sequence[int], pooling: str) -> str:
    ids = np.asarray(document, dtype=np.int64)
    return f"{pooling}-{hashlib.sha256(ids.tobytes()).hexdigest()[:24]}"


def _portions(items: list[tuple[str, Sequence[int]]]) -> list[list[tuple[str, Sequence[int]]]]:
    """Parts of about as many tokens, documents of like length together."""
    portions: list[list[tuple[str, Sequence[int]]]] = []
    tokens = _PORTION
    for item in sorted(items, key=lambda item: len(item[1])):
        if tokens >= _PORTION:
            portions.append([])
            tokens = 0
        portions[-1].append(item)
        tokens += len(item[1])
    return portions


def _save(tensors: dict[str, np.ndarray], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        save_file(tensors, unfinished)
