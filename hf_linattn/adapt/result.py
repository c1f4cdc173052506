"""The result of a run: a full checkpoint whose config tells how it was trained."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from ..conversion.checkpoint import save_checkpoint
from ..modeling.modeling_linattn import LinAttnPreTrainedModel
from ..utils.digest import weights_digest
from ..utils.files import replacing
from ..utils.paths import without_paths
from . import checkpoints
from .checkpoints import Progress
from .inputs import Inputs
from .loading import name_of
from .lora import add_adapter, merged, save_adapter
from .student import fresh_student


def stage_record(stage: str, steps: int, chosen_step: int, progress: Progress, *, keep_best: bool) -> dict[str, Any]:
    """How one stage went, as plain JSON.

    Args:
        stage: its name.
        steps: of the stage.
        chosen_step: the step whose weights it ends with.
        progress: where it stands at its end.
        keep_best: whether it ends with the best evaluation, or with the last one.
    """
    record: dict[str, Any] = {"stage": stage, "steps": steps, "chosen_step": chosen_step}
    if progress.first_loss is not None and progress.last_loss is not None:
        record["eval_loss_before"] = progress.first_loss
        record["eval_loss"] = progress.best_loss if keep_best else progress.last_loss
        record["eval_loss_last"] = progress.last_loss
        record["eval_metrics_before"] = progress.first_metrics
        record["eval_metrics"] = progress.best_metrics if keep_best else progress.last_metrics
    return record | {"tokens": progress.tokens, "seconds": round(progress.seconds, 1)}


def nothing_learned(record: dict[str, Any]) -> bool:
    """Whether a stage, by its record, was evaluated and ends no better than it began."""
    return "eval_loss" in record and (record["chosen_step"] == 0 or record["eval_loss"] >= record["eval_loss_before"])


def advice(stage: str, settings: dict[str, Any]) -> str:
    """What may help where a stage learned nothing: the options that it depends on.

    Args:
        stage: its name.
        settings: of the run, as its record has them.
    """
    if stage == "task":
        rate, usual = settings["learning_rate"], 1e-3 if settings["lora_rank"] else 1e-4
        other = f"a higher learning_rate than {rate:g}" if rate < usual else f"a lower learning_rate than {rate:g}"
        return f"More task_steps than {settings['task_steps']} may help, or {other}."
    names = ("transfer_feature_lr", "transfer_projection_lr", "transfer_query_key_lr")
    if stage == "distil":
        names = ("learning_rate", "query_key_lr", "projection_lr")
    rates = ", ".join(f"{name} ({settings[name]:g})" for name in names)
    return (
        f"Lower learning rates may help: {rates}; or more {stage}_steps; or a longer sequence_length, where sequences "
        "fit into the window and the far part has nothing to do."
    )


def training_record(
    inputs: Inputs, settings: dict[str, Any], history: list[dict[str, Any]], changes: list[dict[str, Any]]
) -> dict[str, Any]:
    """How the model was trained, as plain JSON: the `linattn_training` of its config."""
    earlier = getattr(inputs.model_config, "linattn_training", None)
    record = {
        "model": name_of(inputs.model),
        **({} if inputs.base is None else {"base": name_of(inputs.base)}),
        "stages": history,
        "steps": sum(stage["steps"] for stage in history),
        "tokens": sum(stage["tokens"] for stage in history),
        "seconds": round(sum(stage["seconds"] for stage in history), 1),
        "seed": inputs.config.seed,
        "data": {**settings["data"], "dataset": name_of(inputs.data.dataset)},
        "eval_data": None
        if inputs.eval_data is None
        else {**settings["eval_data"], "dataset": name_of(inputs.eval_data.dataset)},
        "config": settings["config"],
    }
    record = {name: value for name, value in record.items() if value is not None}
    # an earlier version may have left paths in what it recorded
    earlier = without_paths(earlier)
    return record | ({"changes": changes} if changes else {}) | ({"earlier": earlier} if earlier else {})


def write_result(
    inputs: Inputs, tensors: dict[str, Tensor], record: dict[str, Any], output_dir: Path, *, write: bool
) -> LinAttnPreTrainedModel:
    """Make the adapted model, and write it and its adapter.

    Args:
        inputs: of the run.
        tensors: the weights that the last stage ended with.
        record: of `training_record`.
        output_dir: where to write.
        write: whether this process does.

    Returns:
        The model in eval mode, each tensor in the dtype that it came in.
    """
    student = fresh_student(inputs)
    adapted = student.model
    # PEFT writes down where the model was loaded from, and loads it from there
    model: Any = add_adapter(adapted, inputs.config, student.drawn) if inputs.config.lora_rank else adapted
    checkpoints.load_model_state(model, tensors)
    if inputs.config.lora_rank:
        if write:
            _write_adapter(model, output_dir / "adapter")
        adapted = merged(model)
    # the result itself needs no other folder, and is given to others
    adapted.name_or_path = adapted.config.name_or_path = name_of(inputs.model) or ""
    for name, tensor in (*adapted.named_parameters(), *adapted.named_buffers()):
        tensor.data = tensor.data.to(student.dtypes.get(name, tensor.dtype))
    adapted.config.linattn_training = record
    adapted.config.linattn_digest = weights_digest(adapted.state_dict().values())
    if write:
        _write_checkpoint(adapted, inputs, output_dir)
    return adapted.requires_grad_(True).eval()


def _write_adapter(model: Any, folder: Path) -> None:
    with replacing(folder) as unfinished:
        save_adapter(model, unfinished)
        # of a start that was killed after it
        shutil.rmtree(folder, ignore_errors=True)


def _write_checkpoint(model: LinAttnPreTrainedModel, inputs: Inputs, output_dir: Path) -> None:
    """The files of a full checkpoint, config.json last: without it, nobody takes the folder for a model."""
    for leftover in output_dir.glob(".unfinished-*"):
        # of a start that was killed here
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=output_dir) as temporary:
        unfinished = Path(temporary)
        source = inputs.model if isinstance(inputs.model, (str, Path)) else inputs.base
        if isinstance(source, (str, Path)):
            save_checkpoint(model, source, unfinished)
        else:
            model.save_pretrained(unfinished)
        if inputs.tokenizer_given or not isinstance(source, (str, Path)):
            inputs.tokenizer.save_pretrained(unfinished)
        for entry in sorted(unfinished.iterdir(), key=lambda path: path.name == "config.json"):
            target = output_dir / entry.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(entry, target)
