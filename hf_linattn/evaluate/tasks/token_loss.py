"""What tasks share that measure the loss of tokens: texts without what a dataset's tokenization did to them."""

import re
from dataclasses import dataclass, field

from ...data.documents import Document, Documents
from ...modeling.validation import check_choice
from .base import DocumentTask, TaskOptions

DETOKENIZERS = ("none", "wikitext")


@dataclass(kw_only=True)
class TokenLossOptions(TaskOptions):
    """Options of tasks that measure the loss of tokens."""

    detokenizer: str = field(
        default="none",
        metadata={
            "help": "language-modeling, masked-lm: undo the tokenization of a dataset first.",
            "choices": DETOKENIZERS,
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(type(self).__name__, "detokenizer", self.detokenizer, DETOKENIZERS)


class TokenLoss(DocumentTask):
    """A task on detokenized texts."""

    config: TokenLossOptions

    def _load(self) -> Documents:
        documents = super()._load()
        texts = [detokenized(document.text, self.config.detokenizer) for document in documents]
        kept = [Document(d.id, text, d.label, d.group) for d, text in zip(documents, texts, strict=True)]
        return Documents(kept, documents.empty)


def detokenized(text: str, detokenizer: str) -> str:
    """The text as its author wrote it; "wikitext" undoes the spaces and the @ of WikiText."""
    if detokenizer == "none":
        return text
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r" ([,.:;!?)\]}'])", r"\1", text)
    text = re.sub(r"([(\[{]) ", r"\1", text)
    text = re.sub(r'" ([^"]*?) "', r'"\1"', text)
    return re.sub(r" n't", "n't", text).replace(" = = ", "\n").strip()
