"""Many documents through one model: batches of like length, all processes, results in the order of the documents."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, tqdm
from torch import Tensor, nn

Result = TypeVar("Result")


@torch.no_grad()
def run_batches(
    model: nn.Module,
    documents: Sequence[Sequence[int]],
    read: Callable[[nn.Module, Tensor, Tensor, list[int]], list[Result]],
    *,
    batch_tokens: int,
    pad_token_id: int | None,
    desc: str = "",
) -> list[Result]:
    """`read` on batches of documents, without gradients.

    Args:
        model: on the device to compute on.
        documents: token ids of each.
        read: called with the model, input_ids (batch, length), attention_mask (batch, length) and the indices of
            the batch's documents; returns one picklable result per row.
        batch_tokens: a batch has at most this many tokens, padding included, and at least one document.
        pad_token_id: what shorter documents are filled up with at the end; it is masked.
        desc: what the progress bar is called.

    Returns:
        One result per document, on every process the same.
    """
    state = PartialState()
    device = next(model.parameters()).device
    batches = _batches([len(document) for document in documents], batch_tokens)
    # every process takes each n-th batch, so that all have long and short ones
    mine = batches[state.process_index :: state.num_processes]
    results: list[tuple[int, Result]] = []
    total = sum(len(documents[index]) for batch in mine for index in batch)
    with tqdm(total=total, desc=desc, unit="token", unit_scale=True, leave=False) as bar:
        for indices in mine:
            longest = max(len(documents[index]) for index in indices)
            ids = torch.full((len(indices), longest), pad_token_id or 0)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(indices):
                length = len(documents[index])
                ids[row, :length] = torch.tensor(documents[index])
                mask[row, :length] = 1
            results += zip(indices, read(model, ids.to(device), mask.to(device), indices), strict=True)
            bar.update(sum(len(documents[index]) for index in indices))
    if state.num_processes > 1:
        results = gather_object(results)
    by_index = dict(results)
    return [by_index[index] for index in range(len(documents))]


def _batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of the documents, longest first, in batches of at most `batch_tokens` padded tokens."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # the first of a batch is its longest
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def mean_pooled(states: Tensor, mask: Tensor) -> Tensor:
    """Mean over real tokens: states (batch, length, dim), mask (batch, length) -> (batch, dim), float32."""
    weights = mask[..., None].float()
    return (states.float() * weights).sum(1) / weights.sum(1).clamp(min=1)
