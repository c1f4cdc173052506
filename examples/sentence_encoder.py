"""Train a converted sentence encoder on pairs of texts that belong together, with sentence-transformers.

python examples/sentence_encoder.py sentence-transformers/all-MiniLM-L6-v2 --output DIR

The pairs here are the halves of documents: each first half is to be nearest to its own second half.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss

from hf_linattn import LinformerConfig, convert_checkpoint
from hf_linattn.data.documents import DataConfig, load_documents


def main(arguments: Sequence[str] | None = None) -> SentenceTransformer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id or folder of a sentence encoder")
    parser.add_argument("--dataset", default="topics", help="preset, Hub id or file of documents")
    parser.add_argument("--max-length", type=int, default=2048, help="longest document in tokens")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args(arguments)

    # the folder has the pooling of the original, and a max_seq_length of its own
    config = LinformerConfig(window_size=64, global_tokens=1, projection_length=128)
    converted = args.output / "converted"
    convert_checkpoint(args.model, converted, config, max_length=args.max_length, overwrite=True)
    model = SentenceTransformer(str(converted))
    assert model.max_seq_length == args.max_length

    texts = [document.text for document in load_documents(DataConfig(dataset=args.dataset))]
    pairs = Dataset.from_dict(
        {
            "anchor": [text[: len(text) // 2] for text in texts],
            "positive": [text[len(text) // 2 :] for text in texts],
        }
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            str(args.output / "work"),
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=pairs,
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    model.save_pretrained(str(args.output / "trained"))
    return model


if __name__ == "__main__":
    main()
