"""One adaptation from start to end: its stages in turn, its checkpoints, and the folder that comes out of it."""

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from ..conversion.checkpoint import save_checkpoint
from ..data.documents import DataConfig, load_documents
from ..data.tokenizers import load_tokenizer
from ..modeling.architectures import FAMILIES, MODEL_TYPE_PREFIX
from ..modeling.modeling_linattn import HEAD_CLASSES, MODEL_CLASSES, LinAttnPreTrainedModel
from ..utils.lock import only_one
from . import checkpoints
from .batches import Example, Sequences, tokenize
from .config import AdaptConfig
from .distillation import Distil
from .groups import choose_trained
from .loop import DIVERGED, Loop, Progress, Rows, check_processes
from .lora import add_adapter, merged
from .metrics_log import MetricsFile, check_tracker
from .stages import Stage
from .task import HEADS, Task, add_labels
from .teacher import softmax_teacher
from .transfer import Transfer

#: Folder of the run inside the output folder: settings.json, metrics.jsonl, and while it goes on checkpoint and best.
TRAINING = "training"
# What may be another from one start of a run to the next: it does not change what is learned.
_INDIFFERENT = (
    "micro_batch_size",
    "gradient_checkpointing",
    "eval_steps",
    "checkpoint_steps",
    "log_steps",
    "tracker",
)
# What may be changed on purpose while a run is not finished, as after a NaN; the result tells of it.
_MAY_CHANGE = (
    "mixed_precision",
    "max_grad_norm",
    "transfer_feature_lr",
    "transfer_projection_lr",
    "transfer_query_key_lr",
    "feature_lr",
    "projection_lr",
    "query_key_lr",
    "learning_rate",
)

# Attributes of modules in which Transformers keeps shares of dropout that act in training mode.
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "layerdrop")

# Fields that a run of an earlier version may not have written down, as it had them.
_DEFAULTS = {
    part: {f.name: f.default for f in dataclasses.fields(of) if f.default is not dataclasses.MISSING}
    for part, of in (("config", AdaptConfig), ("data", DataConfig), ("eval_data", DataConfig))
}

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
        ValueError: the model, the data and the settings do not fit together.
    """
    config = AdaptConfig() if config is None else config
    for name, value in (("data", data), ("eval_data", eval_data)):
        if not isinstance(value, DataConfig) and not (name == "eval_data" and value is None):
            raise TypeError(
                f"{name} is a {type(value).__name__}; it must be a DataConfig, which names a dataset, folder or file."
            )
    run = _Run(model, Path(output_dir), config, data, eval_data, base, tokenizer, accelerator)
    return run.run()


class _Run:
    def __init__(
        self,
        model: str | Path | LinAttnPreTrainedModel,
        output_dir: Path,
        config: AdaptConfig,
        data: DataConfig,
        eval_data: DataConfig | None,
        base: str | Path | PreTrainedModel | None,
        tokenizer: Any,
        accelerator: Accelerator | None,
    ) -> None:
        if eval_data is not None and not config.eval_sequences:
            raise ValueError("eval_sequences=0 with eval_data: it must be at least 1, or eval_data left out.")
        self.model, self.base, self.config, self.data, self.eval_data = model, base, config, data, eval_data
        self.output_dir, self.training = output_dir, output_dir / TRAINING
        # what is changed on purpose by this start, and by all starts
        self.changed: dict[str, list[Any]] = {}
        self.changes: list[dict[str, Any]] = []
        check_tracker(config.tracker)
        if config.task == "sequence-classification" and data.resolved().label_column is None:
            raise ValueError("task='sequence-classification' needs a label_column in the data.")
        self.start = _config_of(model)
        self._check_start()
        self.given_tokenizer = tokenizer is not None
        self.tokenizer = tokenizer if self.given_tokenizer else self._tokenizer()
        self._check_tokenizer()
        self.settings = _settings(self)
        self._check_output()
        self._check_classes()
        self.given_accelerator = accelerator
        self.metrics = MetricsFile(self.training / "metrics.jsonl")
        self.history: list[dict[str, Any]] = []
        # names of the parameters of which the checkpoint has none
        self.drawn: list[str] = []
        # digest of the documents, as the checkpoint has it that the run goes on from
        self.data_before: str | None = None

    # -- checks, before anything is loaded or written ---------------------------------------------

    def _check_start(self) -> None:
        needs_base = self.config.transfer_steps or self.config.distil_steps or self.config.task_distillation
        if needs_base and self.base is None and getattr(self.start, "linattn_training", None):
            raise ValueError(
                "base is missing: the model has been trained already, and is no teacher for itself; give the softmax "
                "model that was converted (--base)."
            )
        family = FAMILIES[self.start.base_model_type]
        if self.config.task == "causal-lm" and not family.causal:
            raise ValueError(f"task='causal-lm': {family.model_type} is an encoder; use 'masked-lm'.")
        if self.config.task == "masked-lm" and family.causal:
            raise ValueError(f"task='masked-lm': {family.model_type} is a decoder; use 'causal-lm'.")

    def _check_tokenizer(self) -> None:
        max_length = self.start.linattn["max_length"]
        if self.config.sequence_length > max_length:
            raise ValueError(
                f"sequence_length={self.config.sequence_length} is more than the model's max_length={max_length}."
            )
        if len(self.tokenizer) > self.start.vocab_size:
            raise ValueError(
                f"tokenizer: it has {len(self.tokenizer)} tokens, and the model's vocab_size={self.start.vocab_size}."
            )
        if self.config.task == "masked-lm" and self.tokenizer.mask_token_id is None:
            raise ValueError("task='masked-lm': the tokenizer has no mask token.")
        if self._finds_padding and self._padding_id is None:
            raise ValueError("task='sequence-classification': the tokenizer has no token for padding or end of text.")

    def _tokenizer(self) -> Any:
        for place in (self.model, self.base):
            name = place if isinstance(place, (str, Path)) else getattr(place, "name_or_path", "")
            if name:
                try:
                    return load_tokenizer(name)
                except (OSError, ValueError):
                    continue
        raise ValueError("tokenizer is missing: none was found with the model or its base.")

    @property
    def _finds_padding(self) -> bool:
        """Whether the model looks for padding in the tokens: a decoder's class is that of its last real token."""
        return self.config.task == "sequence-classification" and FAMILIES[self.start.base_model_type].causal

    @property
    def _padding_id(self) -> int | None:
        return next(
            (
                token
                for token in (self.tokenizer.pad_token_id, self.start.pad_token_id, self.tokenizer.eos_token_id)
                if isinstance(token, int) and token >= 0
            ),
            None,
        )

    def _check_classes(self) -> None:
        """Whether the head has the class of each document; of a stream that shows when it is read."""
        if self.config.task != "sequence-classification":
            return
        if self.eval_data is not None and self.eval_data.resolved().label_column is None:
            raise ValueError("eval_data needs a label_column for task='sequence-classification'.")
        head = MODEL_CLASSES[HEADS[self.config.task]].get(self.start.base_model_type)
        has_head = head is not None and head.__name__ in (self.start.architectures or ())
        known = set(self.start.label2id if has_head else self._labels)
        if not known:
            return
        if len(known) == 1:
            raise ValueError(
                f"label_column={self.data.resolved().label_column!r}: {known.pop()!r} is the only class; a classifier "
                "needs two."
            )
        evaluated = [] if self.eval_data is None else _labels_of(self.eval_data)
        for data, labels in ((self.data, self._labels), (self.eval_data, evaluated)):
            if data is not None and (odd := sorted(set(labels) - known)):
                raise ValueError(
                    f"label_column={data.resolved().label_column!r} of {data.dataset!r}: {', '.join(map(repr, odd))} "
                    f"is no class of the model, which has {', '.join(map(repr, sorted(known)))}."
                )

    def _check_output(self) -> None:
        if self.output_dir.exists() and not self.output_dir.is_dir():
            raise FileExistsError(f"output_dir={str(self.output_dir)!r} is a file.")
        # the first things that a run writes: one that was killed there has not begun
        begun = {self.training, self.training / ".lock", self.training / ".settings.json-new"}
        if not self.output_dir.exists() or begun.issuperset(self.output_dir.rglob("*")):
            return
        try:
            before = json.loads((self.training / "settings.json").read_text())
            if not isinstance(before, dict):
                raise ValueError("it holds no settings")
        except (OSError, ValueError):
            raise FileExistsError(
                f"output_dir={str(self.output_dir)!r} is not empty, and holds no run that could be continued."
            ) from None
        alone = list(self.output_dir.iterdir()) == [self.training]
        if alone and checkpoints.find(self.training / "checkpoint") is None:
            # it ended before anything of it was kept: nothing can be lost
            return
        for part, values in self.settings.items():
            # an earlier version wrote down less, and had what is the default now
            known = before.get(part, values)
            defaults = {**values, **_DEFAULTS.get(part, {})} if known else {}
            for name in {**known, **values}:
                earlier, value = known.get(name, defaults.get(name)), values.get(name)
                if earlier == value or name in _INDIFFERENT:
                    continue
                if name in _MAY_CHANGE and not self._is_finished():
                    self.changed[name] = [earlier, value]
                else:
                    raise FileExistsError(
                        f"output_dir={str(self.output_dir)!r} holds a run with {name}={earlier!r}, not {value!r}; "
                        "write somewhere else, or remove it."
                    )

    def _is_finished(self) -> bool:
        return (self.output_dir / "config.json").is_file()

    # -- the run ------------------------------------------------------------------------------------

    def run(self) -> LinAttnPreTrainedModel:
        made = self.given_accelerator is None and not AcceleratorState._shared_state
        try:
            self.accelerator = self.given_accelerator or _accelerator(self.config, self.training)
            check_processes(self.config, self.accelerator)
            with only_one(self.training) if self.accelerator.is_main_process else contextlib.nullcontext():
                # asked inside the lock: who had it before may have finished; and by one, so that all do the same
                finished = broadcast_object_list([self._is_finished()])[0]
                if not finished:
                    return self._locked()
                # of a start that was killed between the two
                self._remove_checkpoints()
        finally:
            if made:
                # the next call, which may want another precision, would be given this one
                AcceleratorState._reset_state()
        logger.warning(f"{str(self.output_dir)!r} holds the result of this run already; nothing is left to do.")
        return _load(self.output_dir, None)[0]

    def _remove_checkpoints(self) -> None:
        if self.accelerator.is_main_process:
            for name in ("checkpoint", "best", DIVERGED):
                checkpoints.remove(self.training / name)

    def _locked(self) -> LinAttnPreTrainedModel:
        stages = self.config.stages()
        if self.accelerator.is_main_process:
            _write_whole(self.training / "settings.json", json.dumps(self.settings, indent=1) + "\n")
        if self.config.tracker:
            flat = {k: v for k, v in self.settings["config"].items() if isinstance(v, (int, float, str, bool))}
            # where the run is, and not where it was started
            self.accelerator.init_trackers("linattn", flat, init_kwargs={"wandb": {"dir": str(self.training)}})
        self.accelerator.wait_for_everyone()

        found = checkpoints.find(self.training / "checkpoint")
        state: dict[str, Any] = {"stage": 0, "progress": {}, "history": []}
        tensors = optimizer = None
        if found is not None:
            with checkpoints.readable(found):
                state = checkpoints.read_state(found)
                tensors = checkpoints.read_model(found)
                if Progress(**state["progress"]).step:
                    optimizer = checkpoints.read_optimizer(found)
                self.history, self.changes = state["history"], state.get("changes", [])
                self.data_before = state.get("data")
        names = [name for name, _ in stages]
        if found is not None and state["stage"] < len(stages):
            self._go_on(names[state["stage"]], state["progress"].get("step", 0))
        if self.accelerator.is_main_process:
            done = [*names, "end"][: state["stage"] + 1]
            # the first evaluation of a stage has step 0, and is made again with it
            self.metrics.take_back(done, state["progress"].get("step", 0) or -1)
        for index in range(state["stage"], len(stages)):
            progress = Progress(**(state["progress"] if index == state["stage"] else {}))
            tensors = self._stage(index, *stages[index], tensors, progress, optimizer)
            optimizer = None
        model = self._finished(tensors)
        if self.config.tracker:
            self.accelerator.end_training()
        self.accelerator.wait_for_everyone()
        return model

    def _go_on(self, stage: str, step: int) -> None:
        """Tell from where, and with what that was changed."""
        told = "".join(f", {name}={value!r} in place of {earlier!r}" for name, (earlier, value) in self.changed.items())
        if self.changed:
            self.changes.append({"stage": stage, "step": step, **self.changed})
        if self.accelerator.is_main_process:
            logger.warning(f"Going on from step {step} of stage {stage!r}{told}.")

    def _stage(
        self,
        index: int,
        name: str,
        steps: int,
        tensors: dict[str, Tensor] | None,
        progress: Progress,
        optimizer: dict[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        """Train one stage; what it ends with is the first checkpoint of the next one, and returned."""
        sequences = self._sequences(name, self.data, self.config.eval_sequences if self.eval_data is None else 0)
        digest = sequences.digest()
        if progress.step and self.data_before not in (None, digest):
            raise ValueError(
                f"dataset={self.data.dataset!r} is not what it was when the last checkpoint was written: put back what "
                "it was, or write somewhere else."
            )
        student = self._student()
        needs_teacher = name != "task" or self.config.task_distillation
        # of the weights that the run began with, not of those that it has come to
        teacher = softmax_teacher(student, self.base).float() if needs_teacher else None
        model: Any = add_adapter(student, self.config, self.drawn) if self.config.lora_rank else student
        if tensors is not None:
            checkpoints.load_model_state(model, tensors)
        choose_trained(model, self.config, name)
        stage = self._make_stage(name, model, student, teacher)
        if teacher is not None:
            teacher.to(self.accelerator.device)
        # dropout is for tasks: what imitates a teacher should see what the teacher sees
        stage.train(name == "task")
        # in the transfer no gradient goes from layer to layer, and the teacher's outputs are there once
        if self.config.gradient_checkpointing and name != "transfer":
            _checkpoint_gradients(student, dropout=name == "task")

        folder, best = self.training / "checkpoint", self.training / "best"

        def save(weights: dict[str, Tensor], moments: dict[str, Tensor] | None, progress: Progress) -> None:
            state = {"stage": index, "progress": dataclasses.asdict(progress), "data": digest}
            checkpoints.write(folder, weights, moments, state | self._past())

        def save_best(weights: dict[str, Tensor], progress: Progress) -> None:
            checkpoints.write(best, weights, None, {"stage": index, "step": progress.step})

        def save_diverged(weights: dict[str, Tensor], progress: Progress) -> None:
            checkpoints.write(self.training / DIVERGED, weights, None, {"stage": index, "step": progress.step})

        kept = checkpoints.find(best)
        found = None
        if kept is not None:
            with checkpoints.readable(kept):
                found = checkpoints.read_state(kept)
        if self.config.keep_best and found != {"stage": index, "step": progress.best_step}:
            # killed after an evaluation that came after the checkpoint: it will come again, and be the best again
            progress.best_loss, progress.best_step = math.inf, -1

        # trackers count on through the stages: W&B drops what has a smaller step than something before
        begin = sum(count for _, count in self.config.stages()[:index])

        def record(step: int, metrics: dict[str, float]) -> None:
            if self.accelerator.is_main_process:
                self.metrics.write({"stage": name, "step": step, **metrics})
            if self.config.tracker:
                self.accelerator.log({f"{name}/{key}": value for key, value in metrics.items()}, step=begin + step)

        loop = Loop(
            accelerator=self.accelerator,
            config=self.config,
            stage=stage,
            steps=steps,
            rows=self._rows(name, sequences, student, progress.step),
            evaluation=self._evaluation(name, sequences, student),
            padding_id=self._padding_id or 0,
            record=record,
            save=save,
            save_best=save_best,
            save_diverged=save_diverged,
        )
        progress, tensors = loop.run(progress, optimizer)
        self.accelerator.wait_for_everyone()
        chosen = steps
        if self.config.keep_best and -1 < progress.best_step < steps:
            kept = checkpoints.find(best)
            assert kept is not None and checkpoints.read_state(kept) == {"stage": index, "step": progress.best_step}
            with checkpoints.readable(kept):
                tensors, chosen = checkpoints.read_model(kept), progress.best_step
        if chosen == 0 and self.accelerator.is_main_process:
            logger.warning(
                f"Stage {name!r} is left as it began: no evaluation was better than the first, "
                f"{progress.best_loss:.3g}; the last was {progress.last_loss:.3g}. Lower learning rates or more steps "
                "may help; longer sequences, where those that there are fit into the window."
            )
        self.history.append(
            {
                "stage": name,
                "steps": steps,
                "chosen_step": chosen,
                **self._evaluated(progress),
                "tokens": progress.tokens,
                "seconds": round(progress.seconds, 1),
            }
        )
        if self.accelerator.is_main_process:
            checkpoints.write(folder, tensors, None, {"stage": index + 1, "progress": {}} | self._past())
        self.accelerator.wait_for_everyone()
        return tensors

    def _past(self) -> dict[str, Any]:
        return {"history": self.history, "changes": self.changes}

    def _evaluated(self, progress: Progress) -> dict[str, float]:
        """The loss of a stage's evaluations: of what it began with, and of what it ends with."""
        if progress.first_loss is None or progress.last_loss is None:
            return {}
        end = progress.best_loss if self.config.keep_best else progress.last_loss
        return {"eval_loss_before": progress.first_loss, "eval_loss": end}

    def _student(self) -> LinAttnPreTrainedModel:
        """A fresh model, as the run began with."""
        if isinstance(self.model, LinAttnPreTrainedModel):
            student, self.drawn = copy.deepcopy(self.model).cpu(), []
        else:
            labels = self._labels if self.config.task == "sequence-classification" else None
            student, self.drawn = _load(self.model, self.config.task, labels)
        if self._finds_padding:
            student.config.pad_token_id = self._padding_id
        wanted = HEADS.get(self.config.task or "")
        if wanted and type(student) is not MODEL_CLASSES[wanted].get(student.config.base_model_type):
            raise ValueError(f"task={self.config.task!r} needs a model for {wanted}, not {type(student).__name__}.")
        if adapted := [name for name, _ in student.named_parameters() if ".lora_" in name]:
            raise ValueError(f"model: it has LoRA layers ({adapted[0]}, ...); merge them before it is adapted.")
        # small steps would be lost to the rounding of 16-bit weights, and Adam's moments leave the range of float16
        self.dtypes = {name: tensor.dtype for name, tensor in student.state_dict().items()}
        return student.float()

    def _make_stage(
        self, name: str, model: nn.Module, student: LinAttnPreTrainedModel, teacher: LinAttnPreTrainedModel | None
    ) -> Stage:
        config = self.config
        if name == "transfer":
            return Transfer(model, student, teacher)
        distil = None
        if teacher is not None:
            distil = Distil(
                model,
                student,
                teacher,
                hidden_weight=config.hidden_weight,
                embedding_weight=config.embedding_weight,
                logits_weight=config.logits_weight,
                temperature=config.temperature,
                pooling=config.pooling,
            )
        if name == "distil":
            assert distil is not None
            return distil
        assert config.task is not None
        return Task(model, student, task=config.task, distil=distil, distillation=config.task_distillation)

    # -- data -----------------------------------------------------------------------------------------

    def _sequences(self, stage: str, data: DataConfig, held_out: int) -> Sequences:
        return Sequences(
            data=data,
            tokenizer=self.tokenizer,
            length=self.config.sequence_length,
            # other batches in each stage
            seed=self.config.seed * 10 + ("transfer", "distil", "task").index(stage),
            pool=self.config.shuffle_pool,
            held_out=held_out,
            whole=stage == "task" and self.config.task == "sequence-classification",
        )

    def _rows(self, stage: str, sequences: Sequences, student: LinAttnPreTrainedModel, start: int) -> Any:
        batches: Iterator[list[Example]] = sequences.batches(self.config.batch_size, start)
        return lambda step: self._labelled(stage, next(batches), student, str(step))

    def _evaluation(self, stage: str, sequences: Sequences, student: LinAttnPreTrainedModel) -> Rows:
        if self.eval_data is not None:
            examples = self._sequences(stage, self.eval_data, self.config.eval_sequences).first()
        elif self.config.eval_sequences:
            examples = sequences.evaluation()
        else:
            return []
        return self._labelled(stage, examples, student, "evaluation")

    def _labelled(self, stage: str, examples: list[Example], student: LinAttnPreTrainedModel, step: str) -> Rows:
        config = self.config
        classes = config.task == "sequence-classification" and stage == "task"
        label_ids: Any = student.config.label2id if classes else None
        rows: Rows = tokenize(examples, self.tokenizer, config.sequence_length, label_ids)
        if stage != "task" or classes:
            return rows
        assert config.task is not None
        chance = random.Random(f"{config.seed} labels {step}")
        return add_labels(rows, config.task, self.tokenizer, config.mask_probability, chance)

    @cached_property
    def _labels(self) -> list[str]:
        return _labels_of(self.data)

    # -- the result -------------------------------------------------------------------------------------

    def _finished(self, tensors: dict[str, Tensor] | None) -> LinAttnPreTrainedModel:
        student = self._student()
        # what PEFT writes down of it, as a name that means something elsewhere
        student.name_or_path = student.config.name_or_path = _name_of(self.model) or ""
        model: Any = add_adapter(student, self.config, self.drawn) if self.config.lora_rank else student
        assert tensors is not None
        checkpoints.load_model_state(model, tensors)
        if self.accelerator.is_main_process and self.config.lora_rank:
            unfinished = self.output_dir / ".adapter"
            shutil.rmtree(unfinished, ignore_errors=True)
            model.save_pretrained(unfinished)
            shutil.rmtree(self.output_dir / "adapter", ignore_errors=True)
            os.replace(unfinished, self.output_dir / "adapter")
        if self.config.lora_rank:
            student = merged(model)
        # each tensor in the dtype that it came in
        for name, tensor in (*student.named_parameters(), *student.named_buffers()):
            tensor.data = tensor.data.to(self.dtypes.get(name, tensor.dtype))
        student.config.linattn_training = self._record()
        if self.accelerator.is_main_process:
            self._write(student)
        self._remove_checkpoints()
        return student.requires_grad_(True).eval()

    def _record(self) -> dict[str, Any]:
        """How the model was trained, as plain JSON."""
        earlier = getattr(self.start, "linattn_training", None)
        record = {
            "model": _name_of(self.model),
            **({} if self.base is None else {"base": _name_of(self.base)}),
            "stages": self.history,
            "steps": sum(stage["steps"] for stage in self.history),
            "tokens": sum(stage["tokens"] for stage in self.history),
            "seconds": round(sum(stage["seconds"] for stage in self.history), 1),
            "seed": self.config.seed,
            "data": {**self.settings["data"], "dataset": _name_of(self.data.dataset)},
            "config": self.settings["config"],
        }
        changes = {"changes": self.changes} if self.changes else {}
        return record | changes | ({"earlier": earlier} if earlier else {})

    def _write(self, model: LinAttnPreTrainedModel) -> None:
        """The files of a full checkpoint, config.json last: without it, nobody takes the folder for a model."""
        for leftover in self.output_dir.glob(".unfinished-*"):
            # of a start that was killed here
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=self.output_dir))
        try:
            source = self.model if isinstance(self.model, (str, Path)) else self.base
            if isinstance(source, (str, Path)):
                save_checkpoint(model, source, unfinished)
            else:
                model.save_pretrained(unfinished)
            if self.given_tokenizer or not isinstance(source, (str, Path)):
                self.tokenizer.save_pretrained(unfinished)
            entries = sorted(unfinished.iterdir(), key=lambda path: path.name == "config.json")
            for entry in entries:
                target = self.output_dir / entry.name
                if target.is_dir():
                    shutil.rmtree(target)
                os.replace(entry, target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _labels_of(data: DataConfig) -> list[str]:
    """The classes of the documents; of a stream, which shows them when it is read, none."""
    if data.resolved().streaming:
        return []
    return sorted({str(document.label) for document in load_documents(data)})


def _accelerator(config: AdaptConfig, folder: Path) -> Accelerator:
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


def _config_of(model: str | Path | LinAttnPreTrainedModel) -> Any:
    if isinstance(model, LinAttnPreTrainedModel):
        return model.config
    if not isinstance(model, (str, Path)):
        raise TypeError(f"model is a {type(model).__name__}; it must be a converted model, a folder or a Hub id.")
    config = AutoConfig.from_pretrained(str(model))
    if not config.model_type.startswith(MODEL_TYPE_PREFIX):
        raise ValueError(f"model={str(model)!r} has model_type={config.model_type!r}: convert it first.")
    # says itself what is wrong with the settings
    _ = config.attention
    family, name = config.base_model_type, (config.architectures or [""])[0]
    if name.removeprefix("LinAttn") not in HEAD_CLASSES[family]:
        known = ", ".join(repr(f"LinAttn{head}") for head in HEAD_CLASSES[family])
        raise ValueError(f"model={str(model)!r}: architectures={config.architectures!r} must name one of {known}.")
    if name.endswith("ForMultipleChoice"):
        raise ValueError(f"model={str(model)!r} is a {name}: of heads over several texts at once, none can be adapted.")
    if not isinstance(config.linattn.get("max_length"), int):
        raise ValueError(f"model={str(model)!r}: linattn.max_length is missing from its config.json.")
    return config


def _load(
    folder: str | Path, task: str | None, labels: list[str] | None = None
) -> tuple[LinAttnPreTrainedModel, list[str]]:
    """A converted model with the head that a task needs, or with the one that it was saved with.

    Returns:
        The model, and the names of the parameters that were drawn, because the checkpoint has none.
    """
    config: Any = _config_of(folder)
    family = config.base_model_type
    name = config.architectures[0]
    if task is not None:
        wanted = MODEL_CLASSES[HEADS[task]].get(family)
        if wanted is None:
            raise ValueError(f"task={task!r}: {family} has no such head.")
        if wanted.__name__ != name and labels:
            config.label2id = {label: index for index, label in enumerate(labels)}
            config.id2label = dict(enumerate(labels))
        # the weights of a head that is not in the checkpoint are drawn anew: the same on every start
        with torch.random.fork_rng():
            torch.manual_seed(0)
            loaded: Any = wanted.from_pretrained(str(folder), config=config, output_loading_info=True)
        model, report = loaded
        return model.eval(), sorted(report["missing_keys"])
    cls = HEAD_CLASSES[family][name.removeprefix("LinAttn")]
    return cls.from_pretrained(str(folder), config=config).eval(), []


def _checkpoint_gradients(student: LinAttnPreTrainedModel, *, dropout: bool) -> None:
    student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # it acts in training mode only
    student.train()
    if dropout:
        return
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in _DROPOUTS:
            # shares that are handed to functions, or that skip layers
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _settings(run: _Run) -> dict[str, Any]:
    """What the run was started with, as it is compared with when it is started again."""
    settings: dict[str, Any] = {
        "config": dataclasses.asdict(run.config),
        "data": dataclasses.asdict(run.data),
        "eval_data": {} if run.eval_data is None else dataclasses.asdict(run.eval_data),
        # as JSON has it, which it is compared with
        "attention": {"linattn": json.loads(json.dumps(run.start.linattn))},
        "names": {"model": _name_of(run.model), "base": _name_of(run.base)},
        "weights": {"model": _digest(run.model, run.start)},
    }
    return settings


def _digest(model: str | Path | LinAttnPreTrainedModel, config: Any) -> str:
    """What tells apart models of the same name: of their weights, or of a Hub id its commit."""
    digest = hashlib.sha256()
    if isinstance(model, LinAttnPreTrainedModel):
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif (folder := Path(model).expanduser()).is_dir():
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                while part := file.read(1 << 24):
                    digest.update(part)
    else:
        return str(getattr(config, "_commit_hash", None))
    return digest.hexdigest()


def _name_of(model: Any) -> str | None:
    """A name that means something on other machines: of a folder its last part."""
    if model is None:
        return None
    name = str(model) if isinstance(model, (str, Path)) else model.name_or_path
    path = Path(name).expanduser()
    if name and path.exists():
        return path.resolve().name
    return name or type(model).__name__


def _write_whole(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}-new")
    beside.write_text(text)
    os.replace(beside, path)
