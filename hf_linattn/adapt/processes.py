"""The processes and the precision of a run, which Accelerate sets up, and what of it is supported."""

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType

from .config import AdaptConfig


def make_accelerator(config: AdaptConfig, folder: Path) -> Accelerator:
    """As `accelerate launch` sets it; trackers write to `folder`.

    Raises:
        ValueError: FSDP is asked for where Accelerate does not shard.
    """
    cpu = not torch.accelerator.is_available()
    # no loss reaches a pooler, or a branch that is switched off
    handlers: list[Any] = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    deepspeed, fsdp = (os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true" for name in ("DEEPSPEED", "FSDP"))
    if cpu and deepspeed:
        # told that it is on a CPU, Accelerate leaves DeepSpeed out without a word, and not told so it finds no backend
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
        cpu = False
    accelerator = Accelerator(
        # said, because Accelerate does not look for other processes on a CPU by itself
        cpu=cpu,
        kwargs_handlers=handlers,
        mixed_precision=config.mixed_precision,
        log_with=config.tracker,
        project_dir=str(folder) if config.tracker else None,
    )
    if fsdp and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            f"FSDP was asked for, and Accelerate runs {accelerator.distributed_type.value} instead: it shards over "
            f"several accelerators, and this is process {accelerator.process_index} of {accelerator.num_processes} on "
            f"{accelerator.device}. On a CPU use scripts/accelerate_configs/multi_cpu.yaml."
        )
    return accelerator


def check_processes(config: AdaptConfig, accelerator: Accelerator) -> None:
    """Whether every process gets the same number of rows, and whole parts, and Accelerate does as it was told.

    Raises:
        ValueError: it does not.
    """
    processes = accelerator.num_processes
    if (precision := config.mixed_precision) not in (None, accelerator.mixed_precision):
        raise ValueError(
            f"mixed_precision={precision!r}, and the Accelerator has {accelerator.mixed_precision!r}: leave it out, or "
            "make the Accelerator with it."
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("mixed_precision='fp16' is not supported on a CPU by Accelerate: use 'bf16' or 'no'.")
    if (accumulated := accelerator.gradient_accumulation_steps) != 1:
        raise ValueError(
            f"gradient_accumulation_steps={accumulated} of Accelerate must be 1: gradients of parts of "
            "micro_batch_size add up to those of batch_size."
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        if config.micro_batch_size is not None:
            raise ValueError("micro_batch_size is not supported with DeepSpeed, which takes a step after each part.")
        if (stage := accelerator.state.deepspeed_plugin.zero_stage) not in (1, 2):
            raise ValueError(f"zero_stage={stage} of DeepSpeed is not supported: it must be 1 or 2 (or take FSDP2).")
    if config.batch_size % processes:
        raise ValueError(f"batch_size={config.batch_size} is not a multiple of the {processes} processes.")
    share = config.batch_size // processes
    if config.micro_batch_size is not None and share % config.micro_batch_size:
        raise ValueError(
            f"micro_batch_size={config.micro_batch_size} does not divide the {share} sequences that each of "
            f"{processes} processes gets of batch_size={config.batch_size}."
        )
