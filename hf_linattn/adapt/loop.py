"""The training loop of one stage, on Accelerate."""

import contextlib
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import tqdm
from torch import Tensor, nn

from . import deepspeed_state
from .batches import Row, collate
from .checkpoints import DIVERGED, Progress, StageCheckpoints, load_optimizer_state, model_state, optimizer_state, whole
from .config import AdaptConfig
from .metrics_log import StageLog, attention_statistics, first_non_finite
from .optimizer import current_rates, make_optimizer, schedule, set_learning_rates, trained_by_group
from .stages import Batch, Stage, StageOutput, without_near

Rows = list[Row]


class _Prepared(NamedTuple):
    """A stage as Accelerate wraps it, itself, its optimizer, and the names of its model's parameters."""

    wrapped: nn.Module
    stage: Stage
    optimizer: Any
    names: dict[nn.Parameter, str]


@dataclass
class Loop:
    """Trains one stage.

    Args:
        accelerator: processes and precision.
        config: the settings.
        stage: whose loss; its parameters that require gradients are trained.
        steps: of the stage.
        batches: the rows of each whole batch, the same on every process, from the step on that the stage stands at.
        evaluation: the rows that are evaluated; may be none.
        padding_id: token id of padding.
        log: takes the metrics.
        checkpoints: where the stage's checkpoints are written, by the first process.
    """

    accelerator: Accelerator
    config: AdaptConfig
    stage: Stage
    steps: int
    batches: Iterator[Rows]
    evaluation: Rows
    padding_id: int
    log: StageLog
    checkpoints: StageCheckpoints
    # with DeepSpeed: what it keeps no float32 weights of, as it was
    _uncast: dict[str, Tensor] = field(default_factory=dict, init=False)

    def run(self, progress: Progress, optimizer_tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Train from where `progress` stands to the last step.

        Args:
            progress: kept up to date.
            optimizer_tensors: of the checkpoint within a stage.

        Returns:
            The model's tensors after the last step.

        Raises:
            FloatingPointError: a number is not finite; the message names the layer. The weights before that
                step are kept, beside the last checkpoint: they may be what has gone astray.
        """
        prepared = self._prepare(progress, optimizer_tensors)
        stage, config = prepared.stage, self.config
        bar = tqdm(
            desc=stage.name, total=self.steps, initial=progress.step, unit="step", main_process_only=True, leave=True
        )
        try:
            if self.evaluation and progress.step == 0:
                # what the stage begins with, which may be the best
                self._evaluate(prepared, progress)
            while progress.step < self.steps:
                begun = time.perf_counter()
                rows = next(self.batches)
                logged = (progress.step + 1) % config.log_steps == 0 or progress.step + 1 == self.steps
                loss, metrics = self._step(prepared, rows, progress, with_norms=logged)
                progress.seconds += time.perf_counter() - begun
                last = progress.step == self.steps
                if logged:
                    metrics |= {
                        "loss": loss,
                        **current_rates(prepared.optimizer),
                        **attention_statistics(stage.student),
                    }
                    metrics |= {"tokens": progress.tokens, "tokens_per_second": progress.tokens / progress.seconds}
                    self.log.record(progress.step, metrics)
                    bar.set_postfix(loss=f"{loss:.4f}")
                if self.evaluation and (progress.step % config.eval_steps == 0 or last):
                    self._evaluate(prepared, progress)
                if progress.step % config.checkpoint_steps == 0 or last:
                    self._checkpoint(prepared, rows, progress)
                bar.update(1)
        finally:
            bar.close()
        tensors = self._model_state(stage.model)
        self.accelerator.free_memory()
        return tensors

    def _prepare(self, progress: Progress, optimizer_tensors: dict[str, Tensor] | None) -> _Prepared:
        """The stage and its optimizer as Accelerate wraps them, in the state of the checkpoint."""
        accelerator, config = self.accelerator, self.config
        if (plugin := accelerator.state.deepspeed_plugin) is not None:
            # it cannot tell by itself without a data loader
            share = config.batch_size // accelerator.num_processes
            plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = share
            # it casts what the model has, also what is not trained
            self._uncast = model_state(self.stage.model)
        optimizer: Any = make_optimizer(self.stage.model, config, self.stage.name)
        wrapped, optimizer = accelerator.prepare(self.stage, optimizer)
        stage: Stage = accelerator.unwrap_model(wrapped)
        names = {p: name for name, p in stage.model.named_parameters()}
        for parameter, name in names.items():
            if deepspeed_state.partitioned(parameter):
                deepspeed_state.set_weights(parameter, self._uncast.pop(name))
        if optimizer_tensors is not None:
            load_optimizer_state(_inner(optimizer), names, optimizer_tensors)
        if self._scaler is not None and progress.scaler:
            self._scaler.load_state_dict(progress.scaler)
        return _Prepared(wrapped, stage, optimizer, names)

    def _step(
        self, prepared: _Prepared, rows: Rows, progress: Progress, *, with_norms: bool
    ) -> tuple[float, dict[str, float]]:
        """One step of the optimizer; the loss, and the metrics, with the norms of the gradients if asked for."""
        accelerator, optimizer, names = self.accelerator, prepared.optimizer, prepared.names
        set_learning_rates(optimizer, schedule(progress.step, self.steps, self.config.warmup_steps))
        loss, metrics = self._forward_backward(prepared.wrapped, rows, progress.step)
        norms = self._gradient_norms(names)
        if with_norms:
            metrics |= self._norms_by_group(prepared.stage.model, norms)
        norm = accelerator.clip_grad_norm_([p for p in names if p.requires_grad], self.config.max_grad_norm)
        self._check_step(prepared.stage, loss, norm, norms, rows, progress)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        progress.tokens += sum(len(row["input_ids"]) for row in rows)
        if self._scaler is not None:
            progress.scaler = self._scaler.state_dict()
        return loss, metrics

    @property
    def _scaler(self) -> Any:
        """Of the gradients in float16; None in other precisions."""
        return getattr(self.accelerator, "scaler", None)

    def _model_state(self, model: nn.Module) -> dict[str, Tensor]:
        state = model_state(model)
        # what nothing but the cast has changed, as it was
        return state | {
            name: tensor
            for name, tensor in self._uncast.items()
            if torch.equal(tensor.to(state[name].dtype), state[name])
        }

    def _micro_batches(self, rows: Rows) -> list[Rows]:
        """This process's share of a batch, in micro-batches of `micro_batch_size`."""
        accelerator = self.accelerator
        share = len(rows) // accelerator.num_processes
        mine = rows[accelerator.process_index * share :][:share]
        size = self.config.micro_batch_size or share
        return [mine[begin : begin + size] for begin in range(0, share, size)]

    def _batch(self, rows: Rows) -> Batch:
        return collate(rows, self.padding_id, self.accelerator.device)

    def _forward_backward(self, wrapped: nn.Module, rows: Rows, step: int) -> tuple[float, dict[str, float]]:
        """Loss and metrics of a batch, whose gradients are added up over its micro-batches."""
        accelerator, stage = self.accelerator, self.stage
        # the same on all processes, which must agree on what is switched off; and on what dropout draws anew
        chance = random.Random(f"{self.config.seed} {stage.name} {step}")
        drops_near = chance.random() < self.config.window_dropout
        torch.manual_seed(chance.getrandbits(40) * accelerator.num_processes + accelerator.process_index)
        micro_batches, weight = self._micro_batches(rows), stage.weight(rows)
        total = torch.zeros((), device=accelerator.device)
        metrics: dict[str, Any] = {}
        with without_near(stage.student) if drops_near else contextlib.nullcontext():
            for index, micro_batch in enumerate(micro_batches):
                last = index + 1 == len(micro_batches)
                # processes exchange their gradients once
                with contextlib.nullcontext() if last else accelerator.no_sync(wrapped):
                    out = wrapped(self._batch(micro_batch))
                    # gradients are averaged over the processes, and the loss is a sum over rows
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
        """Of each parameter, before clipping, which by a norm of NaN makes NaN of all gradients.

        Of sharded ones they are put together where they are asked for.
        """
        # DeepSpeed has taken its step by now, and the gradients with it
        return {name: torch.linalg.vector_norm(p.grad) for p, name in names.items() if p.grad is not None}

    def _norms_by_group(self, model: nn.Module, norms: dict[str, Tensor]) -> dict[str, float]:
        # clipping takes the scale out, and may do so once
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        by_group = {}
        for group, members in trained_by_group(model):
            of_group = [whole(norms[name]) for name, _ in members if name in norms]
            if of_group:
                by_group[f"gradient_norm/{group}"] = torch.stack(of_group).norm().item() / scale
        return by_group

    def _check_step(
        self, stage: Stage, loss: float, norm: Any, norms: dict[str, Tensor], rows: Rows, progress: Progress
    ) -> None:
        # a scaler of float16 meets Inf gradients as a matter of course, and skips those steps
        scaled = self._scaler is not None
        if not math.isfinite(loss) or not (scaled or norm is None or math.isfinite(float(norm))):
            what = f"the loss is {loss} and the gradient norm {norm if norm is None else float(norm)}"
            self._stop(stage, progress, progress.step + 1, what, self._micro_batches(rows)[0], norms)

    def _stop(
        self,
        stage: Stage,
        progress: Progress,
        step: int,
        what: str,
        rows: Rows,
        gradient_norms: dict[str, Tensor] | None = None,
    ) -> NoReturn:
        """Keep the weights, and tell where a number first is not finite."""
        where = first_non_finite(stage, stage.model, self._batch(rows), gradient_norms or {})
        tensors = self._model_state(stage.model)
        if self.accelerator.is_main_process:
            self.checkpoints.save_diverged(tensors, progress)
        self.accelerator.wait_for_everyone()
        raise FloatingPointError(
            f"Stage {stage.name!r}, step {step}: {what}; NaN or Inf first in {where}. The weights after step "
            f"{progress.step} are in training/{DIVERGED}, the last checkpoint is as it was; go on from it with lower "
            "learning rates or without mixed precision."
        )

    def _evaluate(self, prepared: _Prepared, progress: Progress) -> None:
        """Log the loss of the evaluation rows, and keep the weights if they are the best so far."""
        loss, metrics = self._evaluation_loss(prepared)
        self.log.record(progress.step, {f"eval/{name}": value for name, value in {"loss": loss, **metrics}.items()})
        stage = prepared.stage
        if not math.isfinite(loss):
            rows = self.evaluation[: self._evaluation_batch_size]
            self._stop(stage, progress, progress.step, f"the loss of the evaluation is {loss}", rows)
        if progress.first_loss is None:
            progress.first_loss, progress.first_metrics = loss, metrics
        progress.last_loss, progress.last_metrics = loss, metrics
        if loss < progress.best_loss:
            progress.best_loss, progress.best_metrics, progress.best_step = loss, metrics, progress.step
            if self.config.keep_best and progress.step < self.steps:
                tensors = self._model_state(stage.model)
                if self.accelerator.is_main_process:
                    self.checkpoints.save_best(tensors, progress)

    @property
    def _evaluation_batch_size(self) -> int:
        """Rows of one process's forward pass."""
        return self.config.micro_batch_size or max(self.config.batch_size // self.accelerator.num_processes, 1)

    @torch.no_grad()
    def _evaluation_loss(self, prepared: _Prepared) -> tuple[float, dict[str, float]]:
        """Loss and metrics of all evaluation rows; every process reads a share of them."""
        stage, wrapped, rows, size = prepared.stage, prepared.wrapped, self.evaluation, self._evaluation_batch_size
        # module by module: with gradient checkpointing only the student is in training mode
        modes = {module: module.training for module in stage.modules()}
        stage.eval()
        processes, weight = self.accelerator.num_processes, stage.weight(rows)
        total = torch.zeros((), device=self.accelerator.device)
        metrics: dict[str, Any] = {}
        starts = list(range(0, len(rows), size))
        for begin in range(0, len(starts), processes):
            # sharded models need as many forward passes on each process: some are not counted
            chosen = begin + self.accelerator.process_index
            counts = float(chosen < len(starts)) * processes
            out = wrapped(self._batch(rows[starts[min(chosen, len(starts) - 1)] :][:size]))
            total = total + _share(out, weight, len(rows)) * counts
            for name, value in out.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value * counts / len(rows)
        for module, training in modes.items():
            module.training = training
        return self._mean(total, metrics)

    def _checkpoint(self, prepared: _Prepared, rows: Rows, progress: Progress) -> None:
        model = self._model_state(prepared.stage.model)
        # no step may come after the last one to notice
        if not all(bool(tensor.isfinite().all()) for tensor in model.values()):
            self._stop(prepared.stage, progress, progress.step, "a weight is NaN or Inf", self._micro_batches(rows)[0])
        optimizer = optimizer_state(_inner(prepared.optimizer), prepared.names)
        if self.accelerator.is_main_process:
            self.checkpoints.save(model, optimizer, progress)
        self.accelerator.wait_for_everyone()


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def _share(out: StageOutput, weight: int, rows: int) -> Tensor:
    """What a micro-batch adds to the loss of a batch of that weight and number of rows; 0 where nothing has a label."""
    loss = out.loss / max(weight, 1)
    return loss if out.beside is None else loss + out.beside / rows
