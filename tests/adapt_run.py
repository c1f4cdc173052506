"""Started as a process of its own by test_adapt_resume: adapts a folder as the JSON in its arguments says."""

import json
import sys

import torch
from accelerate import PartialState

from hf_linattn.adapt import AdaptConfig, adapt
from hf_linattn.documents import DataConfig

if __name__ == "__main__":
    torch.set_num_threads(1)
    model, output, settings, data = sys.argv[1:]
    adapt(model, output, AdaptConfig(**json.loads(settings)), data=DataConfig(**json.loads(data)))
    state = PartialState()
    if state.is_main_process:
        print(state.num_processes, "processes")
