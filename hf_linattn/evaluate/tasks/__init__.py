"""All tasks, by name, and the options of all of them."""

from dataclasses import dataclass

from .base import ExampleOptions, Task
from .classification import Classification
from .embeddings import Embeddings
from .generated import Copy, ListOps, Passkey, Recall
from .language_modeling import LanguageModeling, LanguageModelingOptions
from .masked_lm import MaskedLanguageModeling, MaskedLMOptions
from .pairs import Pairs, PairsOptions
from .passkey_probe import PasskeyProbe
from .probe import Probe, ProbeOptions
from .retrieval import Retrieval

_CLASSES: tuple[type[Task], ...] = (
    Probe,
    Classification,
    Pairs,
    Retrieval,
    Embeddings,
    LanguageModeling,
    MaskedLanguageModeling,
    PasskeyProbe,
    Passkey,
    Copy,
    Recall,
    ListOps,
)
#: name -> task
TASKS: dict[str, type[Task]] = {cls.name: cls for cls in _CLASSES}


@dataclass(kw_only=True)
class TaskConfig(ExampleOptions, MaskedLMOptions, LanguageModelingOptions, PairsOptions, ProbeOptions):
    """The options of all tasks together; each uses its own.

    Raises:
        ValueError: a field has a value that is not allowed; the message names it.
    """
