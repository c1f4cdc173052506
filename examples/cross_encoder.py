"""Train a converted `CrossEncoder`, which reads two texts at once and scores whether they belong together.

python examples/cross_encoder.py cross-encoder/ms-marco-MiniLM-L6-v2 --output DIR

The pairs here are the halves of documents: of the same document (1), or of two (0).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

from hf_linattn import LinformerConfig, convert_checkpoint
from hf_linattn.data.documents import DataConfig, load_documents


def main(arguments: Sequence[str] | None = None) -> CrossEncoder:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id or folder of a cross-encoder, or of an encoder")
    parser.add_argument("--dataset", default="topics", help="preset, Hub id or file of documents")
    parser.add_argument("--max-length", type=int, default=2048, help="longest pair in tokens")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args(arguments)

    converted = args.output / "converted"
    convert_checkpoint(
        args.model,
        converted,
        LinformerConfig(window_size=64, global_tokens=1, projection_length=128),
        max_length=args.max_length,
        auto_class="AutoModelForSequenceClassification",
        num_labels=1,
        overwrite=True,
    )
    model = CrossEncoder(str(converted), max_length=args.max_length)

    texts = [document.text for document in load_documents(DataConfig(dataset=args.dataset))]
    first, second = ([text[: len(text) // 2] for text in texts], [text[len(text) // 2 :] for text in texts])
    # the second half of the next document belongs to another one
    others = [*second[1:], second[0]]
    pairs = Dataset.from_dict(
        {
            "first": [*first, *first],
            "second": [*second, *others],
            "label": [1.0] * len(texts) + [0.0] * len(texts),
        }
    )
    trainer = CrossEncoderTrainer(
        model=model,
        args=CrossEncoderTrainingArguments(
            str(args.output / "work"),
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=pairs,
        loss=BinaryCrossEntropyLoss(model),
    )
    trainer.train()
    model.save_pretrained(str(args.output / "trained"))
    print("same document, two documents:", model.predict([(first[0], second[0]), (first[0], second[1])]))
    return model


if __name__ == "__main__":
    main()
