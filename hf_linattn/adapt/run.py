"""One adaptation from start to end: its stages in turn, its checkpoints, and the folder that comes out of it."""

import contextlib
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..data.documents import DataConfig
from ..modeling.modeling_linattn import LinAttnPreTrainedModel
from ..utils.files import full_disk, write_text
from ..utils.lock import only_one
from . import checkpoints
from .checkpoints import Progress, StageCheckpoints
from .config import AdaptConfig
from .inputs import Inputs, check_classes, collect_inputs
from .loading import load_model, readable_weights
from .loop import Loop
from .lora import add_adapter
from .metrics_log import MetricsFile, StageLog
from .optimizer import choose_trained
from .processes import check_processes, make_accelerator
from .result import advice, stage_record, training_record, write_result
from .resume import SETTINGS, TRAINING, RunState, changed_settings, find_state, is_finished, settings_of
from .stage_data import StageData
from .stages import Stage, make_stage
from .student import checkpoint_gradients, fresh_student
from .teacher import softmax_teacher

logger = logging.get_logger(__name__)


def adapt(
    model: str | Path | LinAttnPreTrainedModel,
    output_dir: str | Path,
    config: AdaptConfig | None = None,
    *,
    data: DataConfig,
    eval_data: DataConfig | None = None,
    base: str | Path | PreTrainedModel | None = None,
    tokenizer: Any = None,
    accelerator: Accelerator | None = None,
) -> LinAttnPreTrainedModel:
    """Train a converted model: attention transfer, distillation and a task, in this order, each if it has steps.

    `output_dir` becomes a full checkpoint, with tokenizer and sentence modules, whose config tells how it
    was trained (`linattn_training`). While the run goes on, its checkpoints are in `output_dir`/training; a
    run that was killed continues when it is started again with the same arguments, and ends as if it had
    not been killed. `output_dir`/training/metrics.jsonl has one line for each logged step. Weights are trained in
    float32; the result has the dtype of `model`.

    Args:
        model: a converted model, or the folder or Hub id of one.
        output_dir: where to write.
        config: stages, losses, learning rates. Default: `AdaptConfig()`.
        data: documents to train on; with `label_column` for the task "sequence-classification".
        eval_data: documents to evaluate on. Default: some sequences of `data` are held out.
        base: the softmax model that `model` was converted from. Default: `model` itself with softmax
            attention, which is the same as long as its weights have not been trained.
        tokenizer: default: the one that is saved with `model`, or with `base`.
        accelerator: default: one made from the environment, as `accelerate launch` sets it.

    Returns:
        The adapted model, in eval mode, on the CPU.

    Raises:
        FileExistsError: `output_dir` holds something else, or a run with other settings.
        FloatingPointError: a loss, a gradient or a weight is NaN or Inf.
        ImportError: the tracker is not installed.
        OSError: the disk is full; the last checkpoint is intact.
        ValueError: the model, the data and the settings do not fit together, or a file of weights is damaged.
    """
    config = AdaptConfig() if config is None else config
    inputs = collect_inputs(model, config, data, eval_data, base, tokenizer)
    output_dir = Path(output_dir)
    settings = settings_of(inputs)
    changed = changed_settings(output_dir, settings)
    check_classes(inputs)
    with _accelerator(accelerator, config, output_dir / TRAINING) as accelerator:
        check_processes(config, accelerator)
        run = _Run(inputs, output_dir, settings, changed, accelerator)
        with only_one(run.training) if accelerator.is_main_process else contextlib.nullcontext():
            # asked inside the lock: who had it before may have finished; and by one, so that all do the same
            finished = broadcast_object_list([is_finished(output_dir)])[0]
            if not finished:
                with full_disk(partial(_what_is_kept, run.training)):
                    return run.train()
            # of a start that was killed between the two
            run.remove_checkpoints()
    logger.warning(f"{str(output_dir)!r} holds the result of this run already; nothing is left to do.")
    return load_model(output_dir, None)[0]


@contextlib.contextmanager
def _accelerator(given: Accelerator | None, config: AdaptConfig, folder: Path) -> Iterator[Accelerator]:
    """The Accelerator that was given, or one for this run alone."""
    own = given is None and not AcceleratorState._shared_state
    try:
        yield make_accelerator(config, folder) if given is None else given
    finally:
        if own:
            # the next call, which may want another precision, would be given this one
            AcceleratorState._reset_state()


def _what_is_kept(training: Path, error: Exception) -> str:
    """What to say of a full disk."""
    kept = "no checkpoint has been written yet"
    if checkpoints.find(training / checkpoints.LAST) is not None:
        kept = "the last checkpoint is intact"
    return f"{str(training.parent)!r}: the disk is full ({error}); {kept}. Make room, and the same command continues."


class _Run:
    """A run that has the lock of its folder."""

    def __init__(
        self,
        inputs: Inputs,
        output_dir: Path,
        settings: dict[str, Any],
        changed: dict[str, list[Any]],
        accelerator: Accelerator,
    ) -> None:
        self.inputs, self.config = inputs, inputs.config
        self.output_dir, self.training = output_dir, output_dir / TRAINING
        self.settings, self.changed = settings, changed
        self.accelerator = accelerator
        self.metrics = MetricsFile(self.training / "metrics.jsonl")

    def train(self) -> LinAttnPreTrainedModel:
        """Go on from the last checkpoint, or begin; the result."""
        self._write_settings()
        state = find_state(self.training)
        self._tell_start(state)
        for index in range(state.stage, len(self.config.stages())):
            state = self._train_stage(index, state)
        assert state.model is not None
        record = training_record(self.inputs, self.settings, state.history, state.changes)
        model = write_result(self.inputs, state.model, record, self.output_dir, write=self.accelerator.is_main_process)
        self.remove_checkpoints()
        if self.config.tracker:
            self.accelerator.end_training()
        self.accelerator.wait_for_everyone()
        return model

    def remove_checkpoints(self) -> None:
        """What a finished run has no use for."""
        if self.accelerator.is_main_process:
            for name in (checkpoints.LAST, checkpoints.BEST, checkpoints.DIVERGED):
                checkpoints.remove(self.training / name)

    def _write_settings(self) -> None:
        if self.accelerator.is_main_process:
            write_text(self.training / SETTINGS, json.dumps(self.settings, indent=1) + "\n")
        if self.config.tracker:
            flat = {k: v for k, v in self.settings["config"].items() if isinstance(v, (int, float, str, bool))}
            # where the run is, and not where it was started
            self.accelerator.init_trackers("linattn", flat, init_kwargs={"wandb": {"dir": str(self.training)}})
        self.accelerator.wait_for_everyone()

    def _tell_start(self, state: RunState) -> None:
        """Tell from where the run goes on, and with what that was changed; take back metrics that come again."""
        names, step = [name for name, _ in self.config.stages()], state.progress.step
        if state.resumed and state.stage < len(names):
            stage = names[state.stage]
            if self.changed:
                state.changes.append({"stage": stage, "step": step, **self.changed})
            if self.accelerator.is_main_process:
                changes = (f", {name}={value!r} in place of {old!r}" for name, (old, value) in self.changed.items())
                logger.warning(f"Going on from step {step} of stage {stage!r}{''.join(changes)}.")
        if self.accelerator.is_main_process:
            begun = [*names, "end"][: state.stage + 1]
            # the first evaluation of a stage has step 0, and is made again with it
            self.metrics.take_back(begun, step or -1)

    def _train_stage(self, index: int, state: RunState) -> RunState:
        """Train one stage from where it stands; where the run stands then, which is its checkpoint."""
        config, accelerator, progress = self.config, self.accelerator, state.progress
        name, steps = config.stages()[index]
        stage, data = self._prepare(name, state)
        kept = StageCheckpoints(self.training, index, data.digest(), state.past)
        # the best of the last step is the last checkpoint itself
        if config.keep_best and progress.best_step < steps and not kept.has_best(progress):
            # it will come again, and be the best again
            progress.best_loss, progress.best_step = math.inf, -1
        loop = Loop(
            accelerator=accelerator,
            config=config,
            stage=stage,
            steps=steps,
            batches=data.batches(progress.step),
            evaluation=data.evaluation(),
            padding_id=self.inputs.padding_id or 0,
            log=self._log(index),
            checkpoints=kept,
        )
        tensors = loop.run(progress, state.optimizer)
        accelerator.wait_for_everyone()
        tensors, chosen_step = self._chosen(name, steps, tensors, progress, kept)
        record = stage_record(name, steps, chosen_step, progress, keep_best=config.keep_best)
        after = RunState(
            stage=index + 1, model=tensors, history=[*state.history, record], changes=state.changes, resumed=True
        )
        if accelerator.is_main_process:
            kept.save_end(tensors, after.past)
        accelerator.wait_for_everyone()
        return after

    def _prepare(self, name: str, state: RunState) -> tuple[Stage, StageData]:
        """The stage with its model, on the weights that the run has come to, and its data.

        Raises:
            ValueError: the data are not what they were when the stage was begun.
        """
        config, inputs = self.config, self.inputs
        student, drawn, _ = fresh_student(inputs)
        data = StageData(inputs, name, student.config.label2id)
        if state.progress.step and state.data not in (None, data.digest()):
            raise ValueError(
                f"dataset={inputs.data.dataset!r} is not what it was when the last checkpoint was written: put back "
                "what it was, or write somewhere else."
            )
        teacher = None
        if name != "task" or config.task_distillation:
            # of the weights that the run began with, not of those that it has come to
            with readable_weights(inputs.base):
                teacher = softmax_teacher(student, inputs.base).float()
        model: Any = add_adapter(student, config, drawn) if config.lora_rank else student
        if state.model is not None:
            checkpoints.load_model_state(model, state.model)
        choose_trained(model, config, name)
        stage = make_stage(name, config, model, student, teacher)
        if teacher is not None:
            teacher.to(self.accelerator.device)
        # dropout is for tasks: what imitates a teacher should see what the teacher sees
        stage.train(name == "task")
        # in the transfer no gradient goes from layer to layer, and the teacher's outputs are there once
        if config.gradient_checkpointing and name != "transfer":
            checkpoint_gradients(student, dropout=name == "task")
        return stage, data

    def _log(self, index: int) -> StageLog:
        stages = self.config.stages()
        begin = sum(steps for _, steps in stages[:index])
        return StageLog(self.metrics, self.accelerator, self.config.tracker is not None, stages[index][0], begin)

    def _chosen(
        self, name: str, steps: int, tensors: dict[str, Tensor], progress: Progress, kept: StageCheckpoints
    ) -> tuple[dict[str, Tensor], int]:
        """The weights that a stage ends with, and the step that they are of: the last ones, or the best ones."""
        if not self.config.keep_best or not -1 < progress.best_step < steps:
            return tensors, steps
        if progress.best_step == 0 and self.accelerator.is_main_process:
            logger.warning(
                f"Stage {name!r} is left as it began: no evaluation was better than the first, "
                f"{progress.best_loss:.3g}; the last was {progress.last_loss:.3g}. "
                f"{advice(name, self.settings['config'])}"
            )
        return kept.read_best(progress), progress.best_step
