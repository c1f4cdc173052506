"""Started as a process of its own by test_resume: adapts a folder as the JSON in its arguments says.

With a fifth argument, "as-gpus", Accelerate takes the processes on the CPU for GPUs, without which it does not shard;
with "kill-N" the first process is killed when it has written its N-th checkpoint.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from hf_linattn.adapt import AdaptConfig, adapt, checkpoints
from hf_linattn.data.documents import DataConfig


def _kill_after(count: int) -> None:
    original, written = checkpoints.write, 0

    def write(folder: Path, *arguments: Any) -> None:
        nonlocal written
        original(folder, *arguments)
        written += folder.name == "checkpoint"
        if written == count:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoints.write = write


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, output, settings, data, *how = sys.argv[1:]
    if "as-gpus" in how:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    kills = [int(word.removeprefix("kill-")) for word in how if word.startswith("kill-")]
    if kills:
        _kill_after(*kills)
    adapt(model, output, AdaptConfig(**json.loads(settings)), data=DataConfig(**json.loads(data)))
    state = PartialState()
    if state.is_main_process:
        print(state.num_processes, "processes", *[state.distributed_type.value for word in how if word == "as-gpus"])
