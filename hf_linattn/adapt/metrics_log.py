"""What a run tells about itself: metrics.jsonl, trackers, and where a number stopped being finite."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..modeling.modeling_linattn import LinAttnPreTrainedModel
from ..utils.files import write_text
from ..utils.hooks import hooked
from .checkpoints import whole
from .stages import Batch, Stage


class MetricsFile:
    """One line of JSON for each logged step; what a killed run wrote after its last checkpoint is taken back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def take_back(self, stages: list[str], step: int) -> None:
        """Keep the lines of earlier stages, and of the last one of `stages` those up to `step`."""
        kept = []
        for line in self.path.read_text(errors="replace").splitlines() if self.path.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # half a line: the run was killed while it wrote
            if not isinstance(row, dict) or not {"stage", "step"} <= row.keys():
                continue
            if row["stage"] in stages[:-1] or (row["stage"] == stages[-1] and row["step"] <= step):
                kept.append(line)
        write_text(self.path, "".join(f"{line}\n" for line in kept))

    def write(self, row: dict[str, Any]) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


@dataclass(frozen=True)
class StageLog:
    """Metrics of one stage, to the file and to the tracker. Every process records; the first one writes.

    Args:
        file: where the first process writes.
        accelerator: has the tracker, if any.
        tracker: whether there is one.
        stage: name of the stage.
        begin: steps of the stages before: a tracker may drop what has a smaller step than something before.
    """

    file: MetricsFile
    accelerator: Accelerator
    tracker: bool
    stage: str
    begin: int

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of a step."""
        if self.accelerator.is_main_process:
            self.file.write({"stage": self.stage, "step": step, **metrics})
        if self.tracker:
            named = {f"{self.stage}/{key}": value for key, value in metrics.items()}
            self.accelerator.log(named, step=self.begin + step)


def check_tracker(name: str | None) -> None:
    """Whether a tracker can be used.

    Raises:
        ImportError: it is not installed.
    """
    if name is not None and importlib.util.find_spec(name) is None:
        raise ImportError(f"tracker={name!r} is not installed: pip install {name}")


def attention_statistics(model: LinAttnPreTrainedModel) -> dict[str, float]:
    """Root mean square of each kind of parameter that the methods learn, over all layers; every process must ask."""
    squares: dict[str, list[Tensor]] = {}
    for _, module in model.linear_attentions():
        for name, parameter in module.named_parameters():
            squares.setdefault(name.rpartition(".")[2], []).append(whole(parameter).float().square().mean())
    return {f"rms/{name}": torch.stack(values).mean().sqrt().item() for name, values in squares.items()}


@torch.no_grad()
def first_non_finite(stage: Stage, model: nn.Module, batch: Batch, gradient_norms: dict[str, Tensor]) -> str:
    """In words, where a batch first gives NaN or Inf: a weight, the output of a module, or a gradient.

    Args:
        stage: whose loss is not finite.
        model: its model.
        batch: of that step.
        gradient_norms: of each parameter, in the order in which the model has them.
    """
    for name, parameter in model.named_parameters():
        if not bool(whole(parameter).isfinite().all()):
            return f"the weight {name}"
    if (module := _first_non_finite_output(stage, model, batch)) is not None:
        return f"the output of {module}"
    # gradients are computed from the last layer to the first
    for name, norm in reversed(gradient_norms.items()):
        if not bool(whole(norm).isfinite()):
            return f"the gradient of {name}"
    return "the loss"


def _first_non_finite_output(stage: Stage, model: nn.Module, batch: Batch) -> str | None:
    first: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else [output]
            if not first and any(isinstance(x, Tensor) and not bool(x.isfinite().all()) for x in tensors):
                first.append(name)

        return hook

    with hooked(module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name):
        stage(batch)
    return first[0] if first else None
