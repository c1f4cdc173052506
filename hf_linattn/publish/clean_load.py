"""Load a converted checkpoint as a stranger does: a script that runs in a process of its own, without this package.

    python -I clean_load.py FOLDER

Ends with 0 where every weight is found and every output is finite, and else with one line that says what is wrong.
"""

import sys
from collections.abc import Iterator
from typing import Any

# Long enough for several blocks and segments of the usual settings.
_LENGTH = 256


def main(folder: str) -> None:
    """Load the folder's model by its own modelling files, and run it once.

    Raises:
        SystemExit: a weight is missing or left over, or an output is not finite.
    """
    sys.modules["hf_linattn"] = None  # type: ignore[assignment]  # as where it is not installed
    import torch
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    # not by an auto class: some heads have none
    cls: Any = get_class_from_dynamic_module(f"modeling_linattn.{config.architectures[0]}", folder)
    model, report = cls.from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise SystemExit(f"the weights and the config do not match, {kind}: {', '.join(map(str, report[kind]))}")

    generator = torch.Generator().manual_seed(0)
    length = min(config.linattn["max_length"], _LENGTH)
    input_ids = torch.randint(config.vocab_size, (2, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, length // 2 + 1 :] = 0
    if cls.__name__.endswith("MultipleChoice"):
        # two choices for one question
        input_ids, attention_mask = input_ids[None], attention_mask[None]
    with torch.no_grad():
        outputs = model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
    for name, value in outputs.items():
        if not all(tensor.isfinite().all() for tensor in _tensors(value)):
            raise SystemExit(f"{name} of random tokens has values that are not finite")


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif getattr(value, "is_floating_point", bool)():
        yield value


if __name__ == "__main__":
    main(sys.argv[1])
