"""Started as a process of its own by test_adapt_resume: adapts a folder as the JSON in its arguments says.

With a fifth argument Accelerate takes the processes on the CPU for GPUs, without which it does not shard.
"""

import json
import sys

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from hf_linattn.adapt import AdaptConfig, adapt
from hf_linattn.documents import DataConfig

if __name__ == "__main__":
    torch.set_num_threads(1)
    model, output, settings, data, *as_gpus = sys.argv[1:]
    if as_gpus:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    adapt(model, output, AdaptConfig(**json.loads(settings)), data=DataConfig(**json.loads(data)))
    state = PartialState()
    if state.is_main_process:
        print(state.num_processes, "processes", *[state.distributed_type.value for _ in as_gpus])
