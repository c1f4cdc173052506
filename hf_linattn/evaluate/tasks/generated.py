"""Tasks of known answer on a model's language modeling head: copy, passkey, recall, ListOps."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from ...data.documents import TOPICS, DataConfig, load_documents
from ...data.synthetic import Example, SyntheticConfig, make_examples
from ...modeling.architectures import ARCHITECTURES
from ..runner import Runner
from .base import ExampleOptions, Metric, Outcomes, Task, metric
from .synthetic import score


class _Generated(Task):
    """Examples from a seed; a causal model predicts the answer, a masked LM fills it in.

    Softmax truncated reads the end of an example, where the question is.
    """

    needs_data = False
    used = ("examples", "seed", "min_distance", "depth")
    config: ExampleOptions
    auto_class: ClassVar[str] = ""

    def __init__(self, config: ExampleOptions, data: DataConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, data, tokenizer)
        causal = ARCHITECTURES[AutoConfig.from_pretrained(tokenizer.name_or_path).model_type].causal
        self.auto_class = "AutoModelForCausalLM" if causal else "AutoModelForMaskedLM"  # type: ignore[misc]
        self._reading = "causal" if causal else "masked"
        self._texts: list[str] | None = None
        if self.name == "passkey":
            self._texts = [document.text for document in load_documents(data or DataConfig(dataset=TOPICS))]
        # a length with too little room is found before any model is loaded
        for length in config.lengths:
            self.examples(length, count=1)

    def examples(self, length: int, *, count: int | None = None) -> list[Example]:
        """The examples of one length."""
        config = SyntheticConfig(
            task=self.name,
            length=length,
            count=count or self.config.examples,
            seed=self.config.seed,
            reading=self._reading,
            min_distance=self.config.min_distance if self.name in ("passkey", "recall") else 0,
            depth=self.config.depth if self.name == "passkey" else None,
        )
        return make_examples(config, self.tokenizer, self._texts)

    def metrics(self) -> list[Metric]:
        return [
            metric("mean", ("exact",), called="exact match", higher_is_better=True),
            metric("mean", ("right",), called="answer tokens right", higher_is_better=True),
        ]

    def outcomes(self, runner: Runner, reference: Runner, length: int) -> Outcomes:
        limit = -(runner.limit or 0)
        examples = [Example(e.input_ids[limit:], e.labels[limit:]) for e in self.examples(length)]

        def read(model: nn.Module, ids: Tensor, mask: Tensor, indices: list[int]) -> list[tuple[int, float]]:
            chosen = [examples[index] for index in indices]
            outcomes = score(model, chosen, batch_size=len(chosen), progress=False)  # type: ignore[arg-type]
            return [(int(outcome.exact), outcome.correct / outcome.answers) for outcome in outcomes]

        results = runner.run([example.input_ids for example in examples], read)
        return {"exact": [exact for exact, _ in results], "right": [right for _, right in results]}

    def documents(self) -> dict[str, Any]:
        return {"examples": self.config.examples}

    def cut(self, length: int) -> int:
        return 0

    def fingerprint(self) -> Any:
        return [*super().fingerprint(), self._texts]


class Copy(_Generated):
    """Random tokens, and the same again."""

    name = "copy"


class Passkey(_Generated):
    """A number planted in running text, asked for at the end."""

    name = "passkey"


class Recall(_Generated):
    """Multi-query associative recall."""

    name = "recall"


class ListOps(_Generated):
    """Nested operations on digits, of Long Range Arena."""

    name = "listops"
