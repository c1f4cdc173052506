"""Going on with a run: what it was started with, whether that is still the same, and where it stands."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.documents import DataConfig
from ..modeling.modeling_linattn import LinAttnPreTrainedModel
from . import checkpoints
from .checkpoints import Progress
from .config import AdaptConfig
from .inputs import Inputs
from .loading import name_of

#: Folder of the run inside the output folder: settings.json, metrics.jsonl, and while it goes on the checkpoints.
TRAINING = "training"
SETTINGS = "settings.json"
# Settings that do not change what is learned: each start of a run may have its own.
_INDIFFERENT = (
    "micro_batch_size",
    "gradient_checkpointing",
    "eval_steps",
    "checkpoint_steps",
    "log_steps",
    "tracker",
)
# Settings that may be changed on purpose while a run is not finished, as after a NaN; the result tells of it.
_MAY_CHANGE = (
    "mixed_precision",
    "max_grad_norm",
    "transfer_feature_lr",
    "transfer_projection_lr",
    "transfer_query_key_lr",
    "feature_lr",
    "projection_lr",
    "query_key_lr",
    "learning_rate",
)
# Fields that an earlier version may not have written down: it had what is the default now.
_DEFAULTS = {
    part: {f.name: f.default for f in dataclasses.fields(of) if f.default is not dataclasses.MISSING}
    for part, of in (("config", AdaptConfig), ("data", DataConfig), ("eval_data", DataConfig))
}


def settings_of(inputs: Inputs) -> dict[str, Any]:
    """What a run was started with, as plain JSON: compared when it is started again."""
    settings: dict[str, Any] = {
        "config": dataclasses.asdict(inputs.config),
        "data": dataclasses.asdict(inputs.data),
        "eval_data": {} if inputs.eval_data is None else dataclasses.asdict(inputs.eval_data),
        # as it is read back
        "attention": {"linattn": json.loads(json.dumps(inputs.model_config.linattn))},
        "names": {"model": name_of(inputs.model), "base": name_of(inputs.base)},
        "weights": {"model": _digest(inputs.model, inputs.model_config)},
    }
    return settings


def _digest(model: str | Path | LinAttnPreTrainedModel, config: Any) -> str:
    """What tells apart models of the same name: of their weights, or of a Hub id its commit."""
    digest = hashlib.sha256()
    if isinstance(model, LinAttnPreTrainedModel):
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif (folder := Path(model).expanduser()).is_dir():
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                while part := file.read(1 << 24):
                    digest.update(part)
    else:
        return str(getattr(config, "_commit_hash", None))
    return digest.hexdigest()


def is_finished(output_dir: Path) -> bool:
    """Whether the folder has the result of a run."""
    return (output_dir / "config.json").is_file()


def changed_settings(output_dir: Path, settings: dict[str, Any]) -> dict[str, list[Any]]:
    """What differs on purpose from the run that is in the folder: name -> [earlier value, value].

    Raises:
        FileExistsError: the folder holds something else, or a run with other settings.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"output_dir={str(output_dir)!r} is a file.")
    if _is_fresh(output_dir):
        return {}
    earlier_settings = _read_settings(output_dir)
    alone = [path.name for path in output_dir.iterdir()] == [TRAINING]
    if alone and checkpoints.find(output_dir / TRAINING / checkpoints.LAST) is None:
        # it ended before anything of it was kept: nothing can be lost
        return {}
    changed: dict[str, list[Any]] = {}
    for part, values in settings.items():
        earlier_values = earlier_settings.get(part, values)
        defaults = {**values, **_DEFAULTS.get(part, {})} if earlier_values else {}
        for name in {**earlier_values, **values}:
            earlier, value = earlier_values.get(name, defaults.get(name)), values.get(name)
            if earlier == value or name in _INDIFFERENT:
                continue
            if name not in _MAY_CHANGE or is_finished(output_dir):
                raise FileExistsError(
                    f"output_dir={str(output_dir)!r} holds a run with {name}={earlier!r}, not {value!r}; "
                    "write somewhere else, or remove it."
                )
            changed[name] = [earlier, value]
    return changed


def _is_fresh(output_dir: Path) -> bool:
    """Whether nothing is there, or only what a run writes first: one that was killed there has not begun."""
    if not output_dir.exists():
        return True
    training = output_dir / TRAINING
    first = {training, training / ".lock", *training.glob(f".{Path(SETTINGS).stem}.*")}
    return first.issuperset(output_dir.rglob("*"))


def _read_settings(output_dir: Path) -> dict[str, Any]:
    try:
        settings = json.loads((output_dir / TRAINING / SETTINGS).read_text())
        if not isinstance(settings, dict):
            raise ValueError("it holds no settings")
    except (OSError, ValueError):
        raise FileExistsError(
            f"output_dir={str(output_dir)!r} is not empty, and holds no run that could be continued."
        ) from None
    return settings


@dataclass
class RunState:
    """Where a run stands.

    Attributes:
        stage: index of the stage to go on with; the number of stages where all are done.
        progress: where that stage stands.
        model: the weights; None at the start of the run.
        optimizer: its tensors within a stage; None at its start.
        history: one record of each stage that is done.
        changes: what was changed on purpose, and where.
        data: digest of the documents that the stage is trained on; None where that is not known.
        resumed: whether there was a checkpoint.
    """

    stage: int = 0
    progress: Progress = field(default_factory=Progress)
    model: dict[str, Tensor] | None = None
    optimizer: dict[str, Tensor] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    data: str | None = None
    resumed: bool = False

    @property
    def past(self) -> dict[str, Any]:
        """What each checkpoint has of earlier stages and starts."""
        return {"history": self.history, "changes": self.changes}


def find_state(training: Path) -> RunState:
    """Where the run in a folder stands; at its start where there is no checkpoint.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    folder = checkpoints.find(training / checkpoints.LAST)
    if folder is None:
        return RunState()
    with checkpoints.readable(folder):
        state = checkpoints.read_state(folder)
        progress = Progress(**state["progress"])
        return RunState(
            stage=state["stage"],
            progress=progress,
            model=checkpoints.read_model(folder),
            optimizer=checkpoints.read_optimizer(folder) if progress.step else None,
            history=state["history"],
            changes=state.get("changes", []),
            data=state.get("data"),
            resumed=True,
        )
