"""Document classification by a model's own head, fine-tuned before."""

from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from ...data.documents import DataConfig, Documents
from ..runner import Runner
from .base import DocumentTask, Metric, Outcomes, TaskOptions, metric, most_frequent


class Classification(DocumentTask):
    """Accuracy and macro F1 of a sequence classification head; the classes are the model's own, by name or number."""

    name = "classification"
    auto_class = "AutoModelForSequenceClassification"

    def __init__(self, config: TaskOptions, data: DataConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, data, tokenizer)
        model_config = AutoConfig.from_pretrained(tokenizer.name_or_path)
        self._labels = [label_id(str(document.label), model_config.label2id) for document in self._documents]

    def _load(self) -> Documents:
        assert self.data is not None
        self.data = self.data.resolved()
        if self.data.label_column is None:
            raise ValueError("label_column is missing; classification needs the class of each document.")
        return super()._load()

    def metrics(self) -> list[Metric]:
        guess = most_frequent(self._labels)
        reads = ("prediction", "label")
        return [metric("accuracy", reads, guess=guess), metric("f1", reads, called="macro F1")]

    def outcomes(self, runner: Runner, reference: Runner, length: int) -> Outcomes:
        def read(model: nn.Module, ids: Tensor, mask: Tensor, indices: list[int]) -> list[int]:
            return model(input_ids=ids, attention_mask=mask).logits.argmax(-1).tolist()

        return {"label": self._labels, "prediction": runner.run(self.at_length(length, runner.limit), read)}


def label_id(label: str, label2id: dict[str, int]) -> int:
    """The model's number of a class, which the dataset gives by name or by that number.

    Raises:
        ValueError: the model has no such class.
    """
    if label in label2id:
        return label2id[label]
    if label.isdecimal() and int(label) in label2id.values():
        return int(label)
    raise ValueError(f"label={label!r} is no class of the model; it knows {', '.join(map(repr, label2id))}.")
