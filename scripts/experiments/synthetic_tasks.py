"""What a swap costs where one far token is the answer: small softmax models that solve such tasks, then converted.

    python scripts/experiments/synthetic_tasks.py --output model_cards/synthetic

trains a model for each task, converts it without further training, and writes what each conversion scores:
TASK.json as soon as a task is done, then report.json, report.md and report.png of all of them. A task whose file
is there is not done again, unless `--again` is given.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pydoc_data.topics import topics
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm.auto import tqdm
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from common import experiment_parser, write_report
from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig, convert
from hf_linattn.data.listops import WORDS
from hf_linattn.data.synthetic import IGNORED, Example, SyntheticConfig, make_examples
from hf_linattn.data.vocabulary import Vocabulary
from hf_linattn.evaluate.tasks.synthetic import Outcome, padded, score
from hf_linattn.utils.figures import REFERENCE, draw_intervals, legend_below
from hf_linattn.utils.files import write_text

_RESAMPLES = 10_000
# test examples have seeds that no training step has
TEST_SEED, TRAIN_SEED = 0, 1_000_000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One task, and how a softmax model comes to solve it.

    config: the test examples.
    stages: training examples, which have other seeds: a share of the steps, and the fields that differ from the
        test's. Easy ones with many answers come first; the last stage is as the test.
    batch_tokens: tokens of one step.
    window_size: of the joined forms; an answer is farther away than a window reaches.
    """

    config: SyntheticConfig
    vocabulary: Vocabulary
    stages: tuple[tuple[float, dict[str, int]], ...]
    steps: int
    batch_tokens: int = 1024
    layers: int = 2
    hidden_size: int = 64
    heads: int = 2
    learning_rate: float = 3e-3
    window_size: int = 16


#: file name -> task
PLANS: dict[str, Plan] = {
    "copy": Plan(
        config=SyntheticConfig(task="copy", length=128),
        vocabulary=Vocabulary.from_words([str(number) for number in range(64)]),
        stages=((1.0, {}),),
        steps=800,
        batch_tokens=2048,
    ),
    "recall": Plan(
        config=SyntheticConfig(task="recall", length=128, pairs=8, power=1.0, min_distance=48),
        vocabulary=Vocabulary.from_words([str(number) for number in range(32)]),
        stages=(
            (0.4, {"length": 16, "pairs": 4, "min_distance": 0}),
            (0.2, {"length": 32, "min_distance": 0}),
            (0.15, {"length": 64, "min_distance": 16}),
            (0.25, {}),
        ),
        steps=8000,
        heads=4,
    ),
    "passkey": Plan(
        config=SyntheticConfig(task="passkey", length=256, min_distance=64),
        vocabulary=Vocabulary.from_bytes(),
        stages=((0.4, {"length": 100, "min_distance": 0}), (0.2, {"length": 160, "min_distance": 32}), (0.4, {})),
        steps=8000,
        hidden_size=96,
        heads=4,
    ),
    "listops": Plan(
        config=SyntheticConfig(task="listops", length=64, min_length=32, max_depth=3, reading="masked"),
        vocabulary=Vocabulary.from_words(WORDS),
        stages=((0.5, {"length": 16, "min_length": 4}), (0.2, {"length": 32, "min_length": 12}), (0.3, {})),
        steps=1500,
        batch_tokens=1536,
        layers=3,
        learning_rate=1e-3,
        window_size=8,
    ),
}


def columns(plan: Plan) -> dict[str, tuple[AttentionConfig | None, dict[str, bool]]]:
    """What is compared: the attention of every layer, None being the trained softmax, and the branches left on."""
    joined = {"window_size": plan.window_size, "global_tokens": 1}
    linformer = {"projection": "mean", "projection_length": plan.config.length // 8}
    joined_linformer = LinformerConfig(**linformer, **joined)
    joined_performer = PerformerConfig(num_features=64, **joined)
    both, near, far = ({"near": near, "far": far} for near, far in ((True, True), (True, False), (False, True)))
    return {
        "softmax, trained for the task": (None, both),
        "Linformer": (LinformerConfig(**linformer), both),
        "Performer": (PerformerConfig(num_features=64), both),
        "window + first token + Linformer": (joined_linformer, both),
        "the same, far off": (joined_linformer, near),
        "the same, near off": (joined_linformer, far),
        "window + first token + Performer": (joined_performer, both),
        "the same with Performer, far off": (joined_performer, near),
        "the same with Performer, near off": (joined_performer, far),
    }


def new_model(plan: Plan) -> PreTrainedModel:
    """A small model with random weights: a Llama for the causal reading, a BERT for the masked one."""
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": plan.vocabulary.size,
        "hidden_size": plan.hidden_size,
        "num_hidden_layers": plan.layers,
        "num_attention_heads": plan.heads,
        "intermediate_size": 4 * plan.hidden_size,
        "max_position_embeddings": plan.config.length,
        "pad_token_id": plan.vocabulary.padding,
        # what is read at one place is said at another: one table for both, and attention that is not flat at first
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if plan.config.reading == "causal":
        # biases and fast rotations, so that a head can look at the token before, whatever it is
        rope = {"rope_type": "default", "rope_theta": 100.0}
        return LlamaForCausalLM(LlamaConfig(**common, attention_bias=True, rope_parameters=rope))
    return BertForMaskedLM(BertConfig(**common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def train(plan: Plan, documents: list[list[int]] | None, name: str) -> PreTrainedModel:
    """A model trained on answers alone, from short examples to those of the test's length."""
    model = new_model(plan).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 1.0) * max(1 - step / plan.steps, 0.02)
    )
    by_step = [
        replace(plan.config, **fields) for share, fields in plan.stages for _ in range(round(share * plan.steps))
    ]
    for step, config in enumerate(tqdm(by_step, desc=f"Training: {name}", unit="step", leave=False)):
        config = replace(config, seed=TRAIN_SEED + step, count=max(plan.batch_tokens // config.length, 1))
        examples = make_examples(config, plan.vocabulary, documents)
        input_ids, mask, labels = padded(examples, plan.vocabulary.padding)
        logits = model(input_ids=input_ids, attention_mask=mask).logits
        # labels stand where they are read: no shift
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def interval(by_seed: Tensor) -> dict[str, float]:
    """Mean of values (seeds, examples), and its 95% interval by bootstrap over examples."""
    examples = by_seed.mean(0)
    drawn = torch.randint(len(examples), (_RESAMPLES, len(examples)), generator=torch.Generator().manual_seed(0))
    ends = torch.quantile(examples[drawn].mean(1), torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return {"value": examples.mean().item(), "low": ends[0], "high": ends[1]}


def metrics(outcomes_by_seed: Sequence[Sequence[Outcome]]) -> dict[str, dict[str, float]]:
    """Share of an example's answer tokens that are right, and whether all of them are."""
    accuracy = [[o.correct / o.answers for o in outcomes] for outcomes in outcomes_by_seed]
    exact = [[float(o.exact) for o in outcomes] for outcomes in outcomes_by_seed]
    return {
        "accuracy": interval(torch.tensor(accuracy, dtype=torch.double)),
        "exact": interval(torch.tensor(exact, dtype=torch.double)),
    }


def documents_of(plan: Plan) -> tuple[list[list[int]] | None, list[list[int]] | None]:
    """The running text of a passkey, in training and in the test: of every four topics, the test has one."""
    if plan.config.task != "passkey":
        return None, None
    encoded = [plan.vocabulary.encode(topics[topic]) for topic in sorted(topics)]
    return [document for number, document in enumerate(encoded) if number % 4], encoded[::4]


def guess(examples: Sequence[Example]) -> float:
    """Share of answer tokens that are right where the most frequent one is always named."""
    asked = [label for example in examples for label in example.labels if label != IGNORED]
    return Counter(asked).most_common(1)[0][1] / len(asked)


def run(name: str, plan: Plan, count: int, seeds: int) -> dict[str, Any]:
    """Train for one task, and score every column on the same examples."""
    start = time.perf_counter()
    config = replace(plan.config, count=count, seed=TEST_SEED)
    train_documents, test_documents = documents_of(plan)
    model = train(plan, train_documents, name)
    seconds = time.perf_counter() - start
    examples = make_examples(config, plan.vocabulary, test_documents)

    rows = []
    for column, (attention, branches) in tqdm(columns(plan).items(), desc=f"Scoring: {name}", leave=False):
        outcomes = []
        random = isinstance(attention, PerformerConfig) and branches["far"]
        for seed in range(seeds if random else 1):
            scored: Any = model
            if attention is not None:
                scored = convert(model, attention, seed=seed)
                scored.set_branches(**branches)
            outcomes.append(score(scored, examples, batch_size=50, progress=False))
        rows.append(
            {
                "column": column,
                "attention": None if attention is None else attention.to_dict(),
                "branches": branches,
                "seeds": seeds if random else 1,
                "metrics": metrics(outcomes),
            }
        )
    return {
        "task": name,
        "settings": vars(config),
        "guess": guess(examples),
        "model": {
            "type": model.config.model_type,
            "layers": plan.layers,
            "hidden_size": plan.hidden_size,
            "vocabulary": plan.vocabulary.size,
            "parameters": model.num_parameters(),
        },
        "training": {
            "steps": plan.steps,
            "batch_tokens": plan.batch_tokens,
            "learning_rate": plan.learning_rate,
            "stages": plan.stages,
            "seconds": round(seconds),
        },
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rows": rows,
    }


def _cell(metric: dict[str, float]) -> str:
    return f"{metric['value']:.3f} ({metric['low']:.2f} to {metric['high']:.2f})"


def markdown(results: list[dict[str, Any]]) -> str:
    """A table of answer tokens, one of whole answers, and what they are of."""
    lines = []
    for metric, title in (("accuracy", "answer tokens right"), ("exact", "examples with every answer token right")):
        lines += [
            f"| {title} | " + " | ".join(result["task"] for result in results) + " |",
            "| --- |" + " --- |" * len(results),
        ]
        for row in range(len(results[0]["rows"])):
            cells = [_cell(result["rows"][row]["metrics"][metric]) for result in results]
            lines.append(f"| {results[0]['rows'][row]['column']} | " + " | ".join(cells) + " |")
        if metric == "accuracy":
            lines.append("| a guess | " + " | ".join(f"{result['guess']:.3f}" for result in results) + " |")
        lines.append("")
    for result in results:
        model, training, settings = result["model"], result["training"], result["settings"]
        lines.append(
            f"* {result['task']}: {settings['count']} examples of {'up to ' * (result['task'] == 'listops')}"
            f"{settings['length']} tokens, window {result['rows'][3]['attention']['window_size']}; {model['type']}, "
            f"{model['layers']} layers of {model['hidden_size']}, {training['steps']:,} steps of "
            f"{training['batch_tokens']:,} tokens."
        )
    lines += [
        "* In brackets: 95% interval, bootstrap over examples, after the mean over seeds where features are random. A "
        "guess: always the most frequent answer token.",
        "* No training after the swap: this tells what the original weights and an approximation of softmax do with "
        "sharp attention, and not what a conversion can learn.",
    ]
    return "\n".join(lines)


def plot(results: list[dict[str, Any]]) -> Figure:
    """Which tasks does a conversion without training keep? A panel for each task."""
    size = (3 + 2.8 * len(results), 4.6)
    figure, panels = plt.subplots(1, len(results), figsize=size, sharex=True, sharey=True, squeeze=False)
    for axes, result in zip(panels[0], results, strict=True):
        softmax, *converted = result["rows"]
        values = [row["metrics"]["accuracy"] for row in converted]
        points = [(v["value"], v["low"], v["high"]) for v in values]
        draw_intervals(axes, [row["column"] for row in converted], {"converted (95%)": points}, rows=True)
        axes.axvline(softmax["metrics"]["accuracy"]["value"], label=softmax["column"], **REFERENCE)
        axes.axvline(result["guess"], label="a guess", **{**REFERENCE, "linestyle": "--"})
        axes.set(xlim=(-0.03, 1.05), title=f"{result['task']}, {result['settings']['length']} tokens")
    panels[0][len(results) // 2].set_xlabel("answer tokens right")
    legend_below(panels[0][len(results) // 2], columns=3)
    return figure


def main() -> int:
    parser = experiment_parser(__doc__, "Folder of the report.")
    parser.add_argument("--tasks", nargs="+", choices=PLANS, default=list(PLANS), help="Tasks to do. Default: all.")
    parser.add_argument("--count", type=int, default=200, help="Examples of each test. Default: 200.")
    parser.add_argument("--seeds", type=int, default=3, help="Seeds of random features. Default: 3.")
    parser.add_argument("--again", action="store_true", help="Do tasks again whose file is there.")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    options.output.mkdir(parents=True, exist_ok=True)
    paths = {name: options.output / f"{name}.json" for name in PLANS}
    for name in options.tasks:
        if options.again or not paths[name].exists():
            write_text(paths[name], json.dumps(run(name, PLANS[name], options.count, options.seeds), indent=1) + "\n")
    # all that was done up to now
    results = [json.loads(path.read_text()) for path in paths.values() if path.exists()]
    write_report(options.output / "report", {"tasks": results}, markdown(results), plot(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
