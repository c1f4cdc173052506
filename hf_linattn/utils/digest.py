"""A digest of a model's weights, the same in memory and in its files."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def weights_digest(tensors: Iterable[Tensor]) -> str | None:
    """SHA-256 of the tensors' types, shapes and values; None where some have none here, as those that are offloaded.

    Names and order do not count, and equal tensors count once: tied weights are in a file once.
    """
    digests = set()
    for tensor in tensors:
        if tensor.is_meta:
            return None
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        # bytes of any dtype
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        digests.add(digest.digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def folder_digest(folder: Path) -> str | None:
    """The digest of all tensors in a folder's safetensors."""

    def tensors() -> Iterable[Tensor]:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no dict
                    yield file.get_tensor(name)

    return weights_digest(tensors())
