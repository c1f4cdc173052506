"""Talk with a converted chat model, whose memory does not grow with the conversation.

python examples/chat.py HuggingFaceTB/SmolLM2-135M-Instruct

Each answer continues from the state of the conversation so far: no token is read twice.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache

from hf_linattn import LinformerConfig, convert


def main(arguments: Sequence[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id or folder of a decoder with a chat template")
    parser.add_argument("--message", action="append", help="say this instead of asking; can be given again")
    parser.add_argument("--max-length", type=int, default=8192, help="longest conversation in tokens")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    args = parser.parse_args(arguments)

    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    # a rotary model needs no training for a window and the first tokens; clusters stand for what is far
    config = LinformerConfig(window_size=256, global_tokens=4)
    model: Any = convert(args.model, config, max_length=args.max_length)

    messages, answers, ids, cache = args.message or _asked(), [], torch.empty(1, 0, dtype=torch.long), DynamicCache()
    for message in messages:
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        ids = torch.cat((ids, turn), dim=1)
        # the state has seen all but the new turn and the last token of the last answer
        output = model.generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),
            past_key_values=cache,
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
        ).cpu()
        answers.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
        print(answers[-1])
        ids = output
    return answers


def _asked() -> Any:
    """What is typed, until an empty line."""
    return iter(lambda: input("> "), "")


if __name__ == "__main__":
    main()
