"""All tasks, by name."""

from .base import Task
from .classification import Classification
from .generated import Copy, ListOps, Passkey, Recall
from .language_modeling import LanguageModeling, MaskedLanguageModeling
from .probing import Pairs, PasskeyProbe, Probe
from .similarity import Embeddings, Retrieval

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
TASKS: dict[str, type[Task]] = {cls.name: cls for cls in _CLASSES}
