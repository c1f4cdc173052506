"""The training loop of one stage, on Accelerate."""

import contextlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, tqdm
from torch import Tensor, nn
from transformers.utils import logging

from . import checkpoints, deepspeed_state
from .batches import collate
from .config import AdaptConfig
from .groups import learning_rates, trained_by_group
from .metrics_log import attention_statistics, first_non_finite
from .stages import Batch, Stage, StageOutput, branches

Rows = list[dict[str, Any]]

#: Folder in that of the run for the weights before a step that gave NaN or Inf.
DIVERGED = "diverged"

logger = logging.get_logger(__name__)


@dataclass
class Progress:
    """Where a stage stands. `seconds` is the time spent in steps, of all starts together."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int = -1
    # of the evaluations
    first_loss: float | None = None
    last_loss: float | None = None
    scaler: dict[str, float] = field(default_factory=dict)


@dataclass
class Loop:
    """Trains one stage.

    Args:
        stage: whose loss; its parameters that require gradients are trained.
        rows: step -> the rows of the whole batch, the same on every process; asked for in order.
        evaluation: the rows that are held out.
        padding_id: token id of padding.
        record: takes (step, metrics) on every process; the first one writes them.
        save: takes (model tensors, optimizer tensors, progress) on the first process, and writes a checkpoint.
        save_best: takes (model tensors, progress) of the best evaluation so far.
        save_diverged: the same of a step that gave NaN or Inf.
    """

    accelerator: Accelerator
    config: AdaptConfig
    stage: Stage
    steps: int
    rows: Callable[[int], Rows]
    evaluation: Rows
    padding_id: int
    record: Callable[[int, dict[str, float]], None]
    save: Callable[[dict[str, Tensor], dict[str, Tensor] | None, Progress], None]
    save_best: Callable[[dict[str, Tensor], Progress], None]
    save_diverged: Callable[[dict[str, Tensor], Progress], None]
    # with DeepSpeed: what it keeps no float32 weights of, as it was
    _uncast: dict[str, Tensor] = field(default_factory=dict, init=False)

    def run(
        self, progress: Progress, optimizer_tensors: dict[str, Tensor] | None = None
    ) -> tuple[Progress, dict[str, Tensor]]:
        """Train from where `progress` stands to the last step; where it stands then, and the model's tensors.

        Raises:
            FloatingPointError: a number is not finite; the message names the layer. The weights before that
                step are kept, beside the last checkpoint: they may be what has gone astray.
        """
        accelerator, config = self.accelerator, self.config
        rates = learning_rates(config, self.stage.name)
        groups = []
        for name, members in trained_by_group(self.stage.model):
            for decayed in (True, False):
                chosen = [p for _, p in members if (p.ndim > 1) == decayed]
                if chosen:
                    decay = config.weight_decay if decayed else 0.0
                    rate = rates[name]
                    groups.append({"params": chosen, "group": name, "lr": rate, "peak": rate, "weight_decay": decay})
        if (plugin := accelerator.state.deepspeed_plugin) is not None:
            # it cannot tell by itself without a data loader
            share = config.batch_size // accelerator.num_processes
            plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = share
            # it casts what the model has, also what is not trained
            self._uncast = checkpoints.model_state(self.stage.model)
        optimizer: Any = torch.optim.AdamW(groups, betas=(0.9, config.adam_beta2))
        wrapped, optimizer = accelerator.prepare(self.stage, optimizer)
        stage: Stage = accelerator.unwrap_model(wrapped)
        names = {p: name for name, p in stage.model.named_parameters()}
        for parameter, name in names.items():
            if deepspeed_state.partitioned(parameter):
                deepspeed_state.set_weights(parameter, self._uncast.pop(name))
        if optimizer_tensors is not None:
            checkpoints.load_optimizer_state(_inner(optimizer), names, optimizer_tensors)
        scaler = self._scaler
        if scaler is not None and progress.scaler:
            scaler.load_state_dict(progress.scaler)

        bar = tqdm(
            desc=stage.name, total=self.steps, initial=progress.step, unit="step", main_process_only=True, leave=True
        )
        try:
            if self.evaluation and progress.step == 0:
                # what the stage begins with, which may be the best
                self._evaluate(wrapped, stage, progress)
            while progress.step < self.steps:
                begun = time.perf_counter()
                rate = self._rate(progress.step)
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * rate
                rows = self.rows(progress.step)
                loss, metrics = self._forward_backward(wrapped, rows, progress.step)
                logged = (progress.step + 1) % config.log_steps == 0 or progress.step + 1 == self.steps
                norms = self._gradient_norms(names)
                if logged:
                    metrics |= self._norms_by_group(stage.model, norms)
                norm = accelerator.clip_grad_norm_([p for p in names if p.requires_grad], config.max_grad_norm)
                self._check_step(stage, loss, norm, norms, rows, progress)
                optimizer.step()
                optimizer.zero_grad()
                progress.step += 1
                progress.tokens += sum(len(row["input_ids"]) for row in rows)
                progress.seconds += time.perf_counter() - begun
                if scaler is not None:
                    progress.scaler = scaler.state_dict()
                last = progress.step == self.steps
                if logged:
                    metrics |= {"loss": loss, **self._rates(optimizer), **attention_statistics(stage.student)}
                    metrics |= {"tokens": progress.tokens, "tokens_per_second": progress.tokens / progress.seconds}
                    self.record(progress.step, metrics)
                    bar.set_postfix(loss=f"{loss:.4f}")
                if self.evaluation and (progress.step % config.eval_steps == 0 or last):
                    self._evaluate(wrapped, stage, progress)
                if progress.step % config.checkpoint_steps == 0 or last:
                    self._checkpoint(stage, optimizer, names, rows, progress)
                bar.update(1)
        finally:
            bar.close()
        tensors = self._model_state(stage.model)
        accelerator.free_memory()
        return progress, tensors

    @property
    def _scaler(self) -> Any:
        """Of the gradients in float16; None in other precisions."""
        return getattr(self.accelerator, "scaler", None)

    def _model_state(self, model: nn.Module) -> dict[str, Tensor]:
        state = checkpoints.model_state(model)
        # what nothing but the cast has changed, as it was
        return state | {
            name: tensor
            for name, tensor in self._uncast.items()
            if torch.equal(tensor.to(state[name].dtype), state[name])
        }

    def _rates(self, optimizer: Any) -> dict[str, float]:
        """The learning rate of each group of parameters."""
        return {f"learning_rate/{group['group']}": group["lr"] for group in optimizer.param_groups}

    def _rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to 0, as a share of the peak."""
        warmup = min(self.config.warmup_steps, self.steps)
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(self.steps - warmup, 1)))

    def _parts(self, rows: Rows) -> list[Rows]:
        """This process's share of a batch, in parts of `micro_batch_size`."""
        accelerator = self.accelerator
        share = len(rows) // accelerator.num_processes
        mine = rows[accelerator.process_index * share :][:share]
        size = self.config.micro_batch_size or share
        return [mine[begin : begin + size] for begin in range(0, share, size)]

    def _batch(self, rows: Rows) -> Batch:
        return collate(rows, self.padding_id, self.accelerator.device)

    def _forward_backward(self, wrapped: nn.Module, rows: Rows, step: int) -> tuple[float, dict[str, float]]:
        accelerator, stage = self.accelerator, self.stage
        # the same on all processes, which must agree on what is switched off; and on what dropout draws anew
        chance = random.Random(f"{self.config.seed} {stage.name} {step}")
        near = chance.random() >= self.config.window_dropout
        torch.manual_seed(chance.getrandbits(40) * accelerator.num_processes + accelerator.process_index)
        parts, weight = self._parts(rows), stage.weight(rows)
        total = torch.zeros((), device=accelerator.device)
        metrics: dict[str, Any] = {}
        for index, part in enumerate(parts):
            quiet = accelerator.no_sync(wrapped) if index + 1 < len(parts) else contextlib.nullcontext()
            # gradients are averaged over the processes, and the loss is a sum over rows
            with quiet, branches(stage.student, near=near):
                out = wrapped(self._batch(part))
                loss = _share(out, weight, len(rows)) * accelerator.num_processes
                accelerator.backward(loss)
            total = total + loss.detach()
            for name, value in out.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value.detach() * accelerator.num_processes / len(rows)
        return self._mean(total, metrics)

    def _mean(self, loss: Tensor, metrics: dict[str, Tensor]) -> tuple[float, dict[str, float]]:
        """Over the processes; one exchange for all of them."""
        values = torch.stack([loss, *metrics.values()]).float()
        loss_value, *rest = self.accelerator.reduce(values, "mean").tolist()
        return loss_value, dict(zip(metrics, rest, strict=True))

    def _gradient_norms(self, names: dict[nn.Parameter, str]) -> dict[str, Tensor]:
        """Of each parameter, as they are before clipping: by a norm of NaN, that makes NaN of all gradients.

        Of sharded ones they are put together where they are asked for.
        """
        # DeepSpeed has taken its step by now, and the gradients with it
        return {name: torch.linalg.vector_norm(p.grad) for p, name in names.items() if p.grad is not None}

    def _norms_by_group(self, model: nn.Module, norms: dict[str, Tensor]) -> dict[str, float]:
        # clipping takes the scale out, and may do so once
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        by_group = {}
        for group, members in trained_by_group(model):
            of_group = [checkpoints.whole(norms[name]) for name, _ in members if name in norms]
            if of_group:
                by_group[f"gradient_norm/{group}"] = torch.stack(of_group).norm().item() / scale
        return by_group

    def _check_step(
        self, stage: Stage, loss: float, norm: Any, norms: dict[str, Tensor], rows: Rows, progress: Progress
    ) -> None:
        # a scaler of float16 meets Inf gradients as a matter of course, and skips those steps
        scaled = self._scaler is not None
        if not math.isfinite(loss) or not (scaled or norm is None or math.isfinite(float(norm))):
            found = f"the loss is {loss} and the gradient norm {norm if norm is None else float(norm)}"
            self._stop(stage, progress, progress.step + 1, found, self._parts(rows)[0], norms)

    def _stop(
        self,
        stage: Stage,
        progress: Progress,
        step: int,
        found: str,
        rows: Rows,
        gradient_norms: dict[str, Tensor] | None = None,
    ) -> NoReturn:
        """Keep the weights, and say where a number first is not finite."""
        where = first_non_finite(stage, stage.model, self._batch(rows), gradient_norms or {})
        tensors = self._model_state(stage.model)
        if self.accelerator.is_main_process:
            self.save_diverged(tensors, progress)
        self.accelerator.wait_for_everyone()
        raise FloatingPointError(
            f"Stage {stage.name!r}, step {step}: {found}; NaN or Inf first in {where}. The weights after step "
            f"{progress.step} are in training/{DIVERGED}, the last checkpoint is as it was; go on from it with lower "
            "learning rates or without mixed precision."
        )

    @torch.no_grad()
    def _evaluate(self, wrapped: nn.Module, stage: Stage, progress: Progress) -> None:
        # module by module: with gradient checkpointing only the student is in training mode
        modes = {module: module.training for module in stage.modules()}
        stage.eval()
        rows, processes = self.evaluation, self.accelerator.num_processes
        weight = stage.weight(rows)
        size = self.config.micro_batch_size or max(self.config.batch_size // processes, 1)
        total = torch.zeros((), device=self.accelerator.device)
        metrics: dict[str, Any] = {}
        # every process evaluates a share; sharded models need as many forward passes on each
        starts = list(range(0, len(rows), size))
        for begin in range(0, len(starts), processes):
            chosen = begin + self.accelerator.process_index
            part = rows[starts[min(chosen, len(starts) - 1)] :][:size]
            out = wrapped(self._batch(part))
            counts = float(chosen < len(starts)) * processes
            total = total + _share(out, weight, len(rows)) * counts
            for name, value in out.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value * counts / len(rows)
        for module, training in modes.items():
            module.training = training
        loss, means = self._mean(total, metrics)
        self.record(progress.step, {f"eval/{name}": value for name, value in {"loss": loss, **means}.items()})
        if not math.isfinite(loss):
            self._stop(stage, progress, progress.step, f"the loss of the evaluation is {loss}", rows[:size])
        progress.first_loss = loss if progress.first_loss is None else progress.first_loss
        progress.last_loss = loss
        if loss < progress.best_loss:
            progress.best_loss, progress.best_step = loss, progress.step
            if self.config.keep_best and progress.step < self.steps:
                tensors = self._model_state(stage.model)
                if self.accelerator.is_main_process:
                    self.save_best(tensors, progress)

    def _checkpoint(
        self, stage: Stage, optimizer: Any, names: dict[nn.Parameter, str], rows: Rows, progress: Progress
    ) -> None:
        model = self._model_state(stage.model)
        # no step may come after the last one to notice
        if not all(bool(tensor.isfinite().all()) for tensor in model.values()):
            self._stop(stage, progress, progress.step, "a weight is NaN or Inf", self._parts(rows)[0])
        tensors = checkpoints.optimizer_state(_inner(optimizer), names)
        if self.accelerator.is_main_process:
            self.save(model, tensors, progress)
        self.accelerator.wait_for_everyone()


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def _share(out: StageOutput, weight: int, rows: int) -> Tensor:
    """What a part adds to the loss of a batch of that weight and number of rows; 0 where nothing has a label."""
    loss = out.loss / max(weight, 1)
    return loss if out.beside is None else loss + out.beside / rows


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
