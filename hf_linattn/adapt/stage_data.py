"""The rows that a stage is trained on and evaluated on, with the labels of its task."""

import random
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from ..data.documents import DataConfig
from ..data.planted import Planter
from .batches import Row, Sequences
from .inputs import Inputs
from .stages import add_labels


class StageData:
    """The data of one stage.

    Args:
        inputs: of the run.
        stage: name of the stage; each has batches of its own.
        label2id: class -> id of the model's head, for the task "sequence-classification".
    """

    def __init__(self, inputs: Inputs, stage: str, label2id: Any) -> None:
        self._inputs, self._config = inputs, inputs.config
        self._is_task = stage == "task"
        self._has_classes = self._is_task and inputs.config.task == "sequence-classification"
        self._label_ids = label2id if self._has_classes else None
        self._seed = inputs.config.seed * 10 + ("transfer", "distil", "task").index(stage)
        self._training = self._sequences(inputs.data, self._config.eval_sequences if inputs.eval_data is None else 0)

    def digest(self) -> str | None:
        """What tells the training examples from others; of a stream, which nobody has read yet, None."""
        return self._training.digest()

    def batches(self, start: int) -> Iterator[list[Row]]:
        """The rows of each batch, without end, from that of step `start` on.

        Raises:
            ValueError: there are fewer sequences than one batch takes.
        """
        for step, rows in enumerate(self._training.batches(self._config.batch_size, start), start):
            yield self._labeled(self._planted(rows, step), str(step))

    def evaluation(self) -> list[Row]:
        """The rows that are evaluated: of the evaluation data, or held out of the training data; may be none."""
        if self._inputs.eval_data is not None:
            rows = self._sequences(self._inputs.eval_data, self._config.eval_sequences).first()
        elif self._config.eval_sequences:
            rows = self._training.evaluation()
        else:
            return []
        return self._labeled(rows, "evaluation")

    def _sequences(self, data: DataConfig, held_out: int) -> Sequences:
        return Sequences(
            data=data,
            tokenizer=self._inputs.tokenizer,
            length=self._config.sequence_length,
            seed=self._seed,
            pool=self._config.shuffle_pool,
            held_out=held_out,
            whole=self._has_classes,
            label_ids=self._label_ids,
        )

    def _planted(self, rows: list[Row], step: int) -> list[Row]:
        """Some of the rows with a planted key or a repeated passage, a function of the step alone."""
        share = 0.0 if self._is_task else self._config.retrieval_share
        if not share:
            return rows
        chosen = random.Random(f"{self._seed} planted {step}")
        return [
            {**row, "input_ids": self._planter.plant(row["input_ids"], f"{self._seed} planted {step} {index}")}
            if chosen.random() < share
            else row
            for index, row in enumerate(rows)
        ]

    @cached_property
    def _planter(self) -> Planter:
        return Planter(self._inputs.tokenizer)

    def _labeled(self, rows: list[Row], step: str) -> list[Row]:
        config = self._config
        if not self._is_task or self._has_classes:
            return rows
        assert config.task is not None
        chance = random.Random(f"{config.seed} labels {step}")
        return add_labels(rows, config.task, self._inputs.tokenizer, config.mask_probability, chance)
