"""The converted model types in Transformers' auto classes, none of which is imported before it is asked for.

`import hf_linattn` takes torch and seconds where it makes the model classes. So the config classes are made when
`AutoConfig` first looks for one of them, and the model classes before the first config.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .modeling.architectures import ARCHITECTURES, MODEL_TYPE_PREFIX

_AUTO_CONFIG = "transformers.models.auto.configuration_auto"


def register() -> None:
    """Make the model types known to `AutoConfig`, now or as soon as it is imported."""
    if _AUTO_CONFIG in sys.modules:
        _add_types(sys.modules[_AUTO_CONFIG])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Waits for the import of `AutoConfig`, and adds a step to it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _AUTO_CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_add(module: ModuleType) -> None:
            execute(module)
            _add_types(module)

        spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]
        return spec


class _ConfigClasses(dict[str, Any]):
    """model_type -> config class: what was registered before, and ours, made when the first of them is read."""

    def __init__(self, registered: dict[str, Any]) -> None:
        super().__init__(registered)
        self.waiting = True
        self.update({MODEL_TYPE_PREFIX + name.replace("-", "_"): None for name in ARCHITECTURES})

    def _make(self) -> None:
        if self.waiting:
            self.waiting = False
            from .modeling.configuration_linattn import CONFIG_CLASSES

            self.update({config_class.model_type: config_class for config_class in CONFIG_CLASSES.values()})

    def __getitem__(self, model_type: str) -> Any:
        if super().__getitem__(model_type) is None:
            self._make()
        return super().__getitem__(model_type)

    def values(self) -> Any:
        self._make()
        return super().values()

    def items(self) -> Any:
        self._make()
        return super().items()


def _add_types(module: ModuleType) -> None:
    """Put our types where `AutoConfig.register` puts classes.

    To register the classes themselves is not possible here: this runs in the middle of the import of others, which
    they are made of.
    """
    mapping = module.CONFIG_MAPPING
    mapping._extra_content = _ConfigClasses(mapping._extra_content)
