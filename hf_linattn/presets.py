"""Named datasets: where the usual public sets of long documents are on the Hub, with their splits and columns."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """The fields of a `DataConfig`, and what the set is."""

    description: str
    fields: dict[str, Any] = field(default_factory=dict)


PRESETS: dict[str, Preset] = {
    "imdb": Preset(
        "Film reviews, positive or negative.",
        {"dataset": "stanfordnlp/imdb", "split": "test", "label_column": "label"},
    ),
}
