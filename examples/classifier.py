"""Train a classifier of long documents: convert an encoder, then `transformers.Trainer`, with or without LoRA.

python examples/classifier.py answerdotai/ModernBERT-base --dataset reviews.jsonl --label-column label --output DIR
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, DataCollatorWithPadding, EvalPrediction, Trainer, TrainingArguments

from hf_linattn import LinformerConfig, convert
from hf_linattn.data.documents import DataConfig, load_documents


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id or folder of an encoder")
    parser.add_argument("--dataset", default="imdb", help="preset, Hub id or file of labeled documents")
    parser.add_argument("--label-column", default=None, help="column of the class; presets know theirs")
    parser.add_argument("--max-documents", type=int, default=2000)
    parser.add_argument(
        "--max-length", type=int, default=2048, help="longest document in tokens; at least the positions that MODEL has"
    )
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank; 0 trains all weights")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--output", required=True, help="folder to write")
    args = parser.parse_args(arguments)

    data = DataConfig(dataset=args.dataset, label_column=args.label_column, max_documents=args.max_documents)
    documents = list(load_documents(data))
    classes = sorted({str(document.label) for document in documents})

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model: Any = convert(
        args.model,
        LinformerConfig(window_size=64, global_tokens=1, projection_length=128),
        max_length=args.max_length,
        auto_class="AutoModelForSequenceClassification",
        num_labels=len(classes),
    )
    if args.lora_rank:
        # PEFT knows which modules of a converted model it adapts by default
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=args.lora_rank))

    rows = [
        {
            **tokenizer(document.text, truncation=True, max_length=args.max_length),
            "labels": classes.index(str(document.label)),
        }
        for document in documents
    ]
    test = len(rows) // 5
    trainer = Trainer(
        model,
        TrainingArguments(
            args.output,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            learning_rate=1e-3 if args.lora_rank else 5e-5,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=rows[test:],
        eval_dataset=rows[:test],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    trainer.train()
    metrics = trainer.evaluate()
    print(f"accuracy on {test} documents: {metrics['eval_accuracy']:.3f}")
    # adapters are merged, so that the folder loads with AutoModelForSequenceClassification alone
    (model.merge_and_unload() if args.lora_rank else model).save_pretrained(args.output)
    tokenizer.model_max_length = args.max_length
    tokenizer.save_pretrained(args.output)
    return metrics


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


if __name__ == "__main__":
    main()
