"""The modules that PEFT adapts where nobody names any: it looks them up by `model_type`, in tables of its own."""

import sys
from typing import Any

from .architectures import ARCHITECTURES, MODEL_TYPE_PREFIX

#: names of queries' and keys' modules -> queries' and values', which LoRA adapts by default
_QUERY_VALUE: dict[tuple[str, ...], list[str]] = {
    ("query", "key"): ["query", "value"],
    ("q_lin", "k_lin"): ["q_lin", "v_lin"],
    ("q_proj", "k_proj"): ["q_proj", "v_proj"],
}


def add_peft_defaults() -> None:
    """Give converted model types the defaults of their base in every table of PEFT, once PEFT is imported.

    LoRA has a default for every architecture, also where PEFT has none for the base.
    """
    constants: Any = sys.modules.get("peft.utils.constants")
    if constants is None:
        return
    for name, table in vars(constants).items():
        if not name.endswith(("_TARGET_MODULES_MAPPING", "_FEEDFORWARD_MODULES_MAPPING")):
            continue
        for model_type, row in ARCHITECTURES.items():
            default = table.get(model_type)
            if default is None and name == "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING":
                # where queries, keys and values have one matrix, that
                default = _QUERY_VALUE.get(row.query_key, list(row.query_key))
            if default is not None:
                table.setdefault(MODEL_TYPE_PREFIX + model_type.replace("-", "_"), default)
