"""The settings of an adaptation. The defaults are what did best so far on a sentence encoder of 23M parameters."""

from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from ..modeling.validation import check_bool, check_choice, check_integer, check_number

TASKS = ("sequence-classification", "masked-lm", "causal-lm")
TRACKERS = ("tensorboard", "wandb", "trackio")
PRECISIONS = ("no", "bf16", "fp16")
POOLINGS = ("mean", "cls")


@dataclass(kw_only=True)
class AdaptConfig:
    """Stages, losses, learning rates and the loop. A stage with 0 steps is left out.

    Raises:
        ValueError: a field has a value that is not allowed; the message names it.
    """

    transfer_steps: int | None = field(
        default=None,
        metadata={
            "help": "Steps of attention transfer: each layer learns its own softmax output. Default: 0 for models with "
            "a window, else 150."
        },
    )
    distil_steps: int = field(
        default=500,
        metadata={
            "help": "Steps in which the whole model learns the base model's hidden states and embedding, or logits."
        },
    )
    task_steps: int = field(default=0, metadata={"help": "Steps of training for --task, after the other stages."})
    task: str | None = field(
        default=None,
        metadata={
            "help": "What the task stage trains: the labels of --label-column, masked or next tokens.",
            "choices": TASKS,
        },
    )

    sequence_length: int = field(default=512, metadata={"help": "Longest training sequence in tokens."})
    batch_size: int = field(
        default=4, metadata={"help": "Sequences per step, over all processes and accumulated parts together."}
    )
    micro_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Sequences per process and forward pass; gradients add up to --batch-size. Default: all at once."
        },
    )
    shuffle_pool: int = field(
        default=4096, metadata={"help": "With --streaming, how many sequences are read ahead and shuffled."}
    )

    transfer_feature_lr: float = field(
        default=4e-2, metadata={"help": "Learning rate of Performer's feature maps in the transfer."}
    )
    transfer_projection_lr: float = field(
        default=1e-3,
        metadata={
            "help": "Learning rate of Linformer's projections in the transfer. Convolutions, which have few weights, "
            "take more (1e-2)."
        },
    )
    transfer_query_key_lr: float = field(
        default=2e-3, metadata={"help": "Learning rate of query and key weights in the transfer. 0 keeps them."}
    )
    feature_lr: float = field(default=3e-3, metadata={"help": "Learning rate of feature maps in the later stages."})
    projection_lr: float = field(
        default=1e-4,
        metadata={"help": "Learning rate of projections in the later stages. Convolutions take more (1e-2)."},
    )
    query_key_lr: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of query and key weights in the later stages. 0 keeps them. Default: 2e-4, in "
            "distillation of a model with a window 1e-4."
        },
    )
    learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of all other weights in the later stages. 0 keeps them. Default: 2e-5, in "
            "distillation of a model with a window 1e-5."
        },
    )
    train_embeddings: bool = field(
        default=False,
        metadata={"help": "Train embeddings too. Positions that are longer than the training data would fall behind."},
    )
    warmup_steps: int = field(
        default=10,
        metadata={"help": "Steps of each stage until the learning rates are reached; then cosine decay to 0."},
    )
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW's weight decay, on matrices only."})
    adam_beta2: float = field(default=0.99, metadata={"help": "AdamW's second beta."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm."})

    hidden_weight: float = field(
        default=1.0, metadata={"help": "Weight of the error of the hidden states in distillation."}
    )
    embedding_weight: float = field(
        default=2.0, metadata={"help": "Weight of 1 - cosine of the pooled embedding (encoders)."}
    )
    logits_weight: float = field(
        default=1.0, metadata={"help": "Weight of the KL divergence of the logits (decoders)."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Temperature of that divergence."})
    pooling: str = field(default="mean", metadata={"help": "How an embedding is pooled.", "choices": POOLINGS})
    window_dropout: float = field(
        default=0.0,
        metadata={
            "help": "Share of steps in which the exact part is switched off, so that the far part learns to do without."
        },
    )
    retrieval_share: float = field(
        default=0.0,
        metadata={
            "help": "Share of the training sequences of transfer and distillation that get a planted key, which is "
            "asked for at the end, or a repeated passage. The teacher reads the same."
        },
    )
    task_distillation: float = field(
        default=0.0, metadata={"help": "Weight of the distillation loss beside the loss of the task."}
    )
    mask_probability: float = field(default=0.15, metadata={"help": "Share of tokens to guess with --task masked-lm."})

    lora_rank: int = field(
        default=0, metadata={"help": "Train adapters of this rank instead of the weights. 0: no LoRA."}
    )
    lora_alpha: float | None = field(default=None, metadata={"help": "LoRA's alpha. Default: twice the rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "LoRA's dropout, in the task stage."})
    lora_targets: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the modules that get an adapter. Default: all linear layers but heads."},
    )

    mixed_precision: str | None = field(
        default=None, metadata={"help": "Precision of the forward pass. Default: Accelerate's.", "choices": PRECISIONS}
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Keep fewer activations and compute them again."}
    )
    eval_sequences: int = field(
        default=16, metadata={"help": "Sequences held out of the training data where there are no evaluation data."}
    )
    eval_steps: int = field(default=100, metadata={"help": "Steps between two evaluations."})
    checkpoint_steps: int = field(
        default=100, metadata={"help": "Steps between two checkpoints, of which the last is kept."}
    )
    keep_best: bool = field(
        default=True,
        metadata={"help": "End each stage with the weights of its best evaluation, not with the last ones."},
    )
    log_steps: int = field(default=10, metadata={"help": "Steps between two lines of metrics."})
    tracker: str | None = field(
        default=None, metadata={"help": "Also log to this tracker, which must be installed.", "choices": TRACKERS}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the order of the data and of everything random."})

    def __post_init__(self) -> None:
        for f in fields(self):
            self._check(f)
        if bool(self.task_steps) != (self.task is not None):
            raise ValueError(f"task_steps={self.task_steps} and task={self.task!r}: give both, or neither.")
        if self.transfer_steps is not None and not self.stages():
            raise ValueError("transfer_steps, distil_steps and task_steps are all 0: there is nothing to train.")
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of micro_batch_size={self.micro_batch_size}."
            )
        if self.shuffle_pool < self.batch_size:
            raise ValueError(f"shuffle_pool={self.shuffle_pool} is less than batch_size={self.batch_size}.")
        if self.lora_targets is not None and not self.lora_rank:
            raise ValueError(f"lora_targets={self.lora_targets!r} needs a lora_rank above 0.")
        targets = self.lora_targets
        if targets is not None and (isinstance(targets, str) or not targets):
            raise ValueError(f"lora_targets={targets!r} must be a list of names, at least one.")

    def _check(self, f: Field[Any]) -> None:
        """Whether a field has a value of its type that is allowed."""
        owner, name, value = type(self).__name__, f.name, getattr(self, f.name)
        kind = getattr(f.type, "__name__", str(f.type))
        if value is None and "None" in kind:
            return
        if kind.startswith("int"):
            check_integer(owner, name, value, 0 if name in _MAY_BE_ZERO else 1)
        elif kind.startswith("float"):
            check_number(owner, name, value, 0, above=name in _ABOVE_ZERO)
            if name in _SHARES and value > 1:
                raise ValueError(f"{owner}: {name}={value!r} must be a number from 0 to 1.")
            if name in _BELOW_ONE and value >= 1:
                raise ValueError(f"{owner}: {name}={value!r} must be below 1.")
        elif kind == "bool":
            check_bool(owner, name, value)
        if "choices" in f.metadata:
            check_choice(owner, name, value, f.metadata["choices"])

    def for_model(self, *, window: bool) -> "AdaptConfig":
        """The settings with the defaults of a model with or without a window in place of None.

        Raises:
            ValueError: nothing is left to train.
        """
        # a model with a window is close to its base from the start, and small steps keep it so; a task is new to both
        small = window and self.task is None
        defaults: dict[str, Any] = {
            "transfer_steps": 0 if window else 150,
            "query_key_lr": 1e-4 if small else 2e-4,
            "learning_rate": 1e-5 if small else 2e-5,
        }
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})

    def stages(self) -> list[tuple[str, int]]:
        """Names and steps of the stages, in their order. Only `for_model` tells whether there is a transfer."""
        steps = (("transfer", self.transfer_steps), ("distil", self.distil_steps), ("task", self.task_steps))
        return [(name, count) for name, count in steps if count]


_MAY_BE_ZERO = ("transfer_steps", "distil_steps", "task_steps", "warmup_steps", "lora_rank", "eval_sequences", "seed")
_ABOVE_ZERO = ("temperature", "max_grad_norm", "lora_alpha")
_BELOW_ONE = ("lora_dropout", "adam_beta2")
_SHARES = ("window_dropout", "mask_probability", "retrieval_share")
