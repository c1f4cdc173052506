"""Time and peak memory of one forward pass, in a fresh process, so that nothing that ran before counts."""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import PartialState
from transformers.utils import logging

from ..modeling.configuration_linattn import AttentionConfig
from ..utils.memory import PeakMemory
from .models import ComparedModel, base_length, load_model


@dataclass(frozen=True)
class Footprint:
    """One model at one length: median seconds of a forward pass, and peak memory beyond the model.

    One document; softmax in chunks reads its chunks as one batch.
    """

    column: str
    length: int
    seconds: float
    tokens_per_second: float
    peak_bytes: int


def footprint(compared: ComparedModel, base: str, length: int, *, repeats: int = 3, **options: Any) -> Footprint:
    """Measure one model at one length, in a process of its own.

    Args:
        compared: what is measured; of several seeds the first.
        base: id or folder of the softmax checkpoint.
        length: tokens.
        repeats: forward passes after the first, of which the median counts.
        options: of `load_model`.

    Raises:
        RuntimeError: the process failed; the message has the end of what it said.
    """
    source = compared.sources[0]
    call = {
        "column": asdict(compared) | {"sources": [source if isinstance(source, str) else source.to_dict()]},
        "base": base,
        "length": length,
        "repeats": repeats,
        "options": options,
    }
    # a process of its own, also where this one was started by a launcher
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import main; main()", json.dumps(call)],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(f"{compared.name} at {length} tokens: {done.stderr.strip()[-500:]}")
    return Footprint(**json.loads(done.stdout.splitlines()[-1]))


@torch.no_grad()
def _measure(call: dict[str, Any]) -> Footprint:
    sources = tuple(AttentionConfig.from_dict(s) if isinstance(s, dict) else s for s in call["column"].pop("sources"))
    compared = ComparedModel(**call["column"], sources=sources)
    device = PartialState().device
    model = load_model(compared, call["base"], **call["options"]).to(device)
    length = call["length"]
    # any tokens will do: linear or softmax, the work does not depend on them
    ids = torch.arange(length, device=device)[None] % min(model.get_input_embeddings().weight.shape[0], 1000)  # type: ignore[operator]
    keywords = {"use_cache": False} if getattr(model, "can_generate", lambda: False)() else {}
    inputs = [ids]
    if compared.kind == "chunks":
        # whole chunks as one batch, and the rest
        own = min(base_length(call["base"]), length)
        whole = length // own * own
        inputs = [x for x in (ids[:, :whole].reshape(-1, own), ids[:, whole:]) if x.numel()]

    def forward() -> None:
        for x in inputs:
            model(input_ids=x, **keywords)

    with PeakMemory(device) as memory:
        forward()
    seconds = []
    for _ in range(call["repeats"]):
        start = time.perf_counter()
        forward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return Footprint(compared.name, length, median, length / median, memory.bytes)


def main() -> None:
    """What the fresh process runs: the call is its argument, and the last line it prints is the result."""
    logging.disable_progress_bar()
    print(json.dumps(asdict(_measure(json.loads(sys.argv[1])))))
