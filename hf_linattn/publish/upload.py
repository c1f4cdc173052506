"""Publishing a converted checkpoint: its folder is checked, loaded in a fresh process, and pushed with a card."""

import contextlib
import fnmatch
import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, get_token
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, RepositoryNotFoundError
from transformers.utils import logging

from ..conversion.checkpoint_files import SENTENCE_FILES
from ..modeling.architectures import MODEL_TYPE_PREFIX
from ..utils.files import inside, write_text
from .card import CARRIED, PLOTS, model_card, named_datasets, plots_of, read_report
from .checks import check_folder, cleaned_files, load_afresh

# Files of an earlier push that a new one replaces: shards of another number, code of an older version, the modules of
# a sentence encoder that the model is no longer.
_REPLACED = ("*.safetensors", "*.safetensors.index.json", "*.py", f"{PLOTS}/*", *SENTENCE_FILES, "[0-9]_*/*")
#: Where a dry run writes the card, beside the model; a file of this name is never pushed.
DRY_CARD = "card.md"
# What a repository may hold before the first push.
_EMPTY = {".gitattributes", "README.md", "LICENSE"}

_T = TypeVar("_T")
logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class PushConfig:
    """Where a converted checkpoint is pushed to, and what its card is made from.

    Raises:
        ValueError: `repo` is empty.
    """

    repo: str = field(metadata={"help": "Name on the Hub: NAME or OWNER/NAME. It is made where there is none."})
    private: bool | None = field(
        default=None,
        metadata={"help": "Whether a new repository is private. Default: as your account has it, usually public."},
    )
    revision: str | None = field(
        default=None, metadata={"help": "Branch to push to, made where there is none. Default: main."}
    )
    report: str | None = field(
        default=None,
        metadata={"help": "Folder of an evaluation: the numbers of report.json and the plots go on the card."},
    )
    base_model: str | None = field(
        default=None,
        metadata={
            "help": "Hub id of the model that was converted, or 'local' where it is not on the Hub. Default: the one "
            "that the conversion recorded."
        },
    )
    license: str | None = field(
        default=None,
        metadata={"help": "License as the Hub names it, such as apache-2.0. Default: that of the base model."},
    )
    message: str = field(default="Upload converted model", metadata={"help": "First line of the commit on the Hub."})
    dry_run: bool = field(
        default=False,
        metadata={"help": f"Send nothing: check the folder, write the card to {DRY_CARD} in it, and list the files."},
    )

    def __post_init__(self) -> None:
        if not self.repo:
            raise ValueError("repo='' must be a name on the Hub, such as 'me/bert-performer'.")


@dataclass(frozen=True)
class Pushed:
    """What a push made, or of a dry run would make.

    Attributes:
        repo_id: owner and name.
        revision: commit of weights and code, which the card's snippet names; of a dry run the branch.
        url: address of the repository.
        card: the text of the card; of a folder with a README.md of its own, that.
        files: paths of the files, within the folder.
    """

    repo_id: str
    revision: str
    url: str
    card: str
    files: Sequence[str]


def push(folder: str | Path, config: PushConfig, *, token: str | None = None) -> Pushed:
    """Push a folder that `convert_checkpoint` or `save_pretrained` wrote, with a model card.

    Pushed are weights, config, modelling files, tokenizer, generation config, a sentence encoder's other modules
    and licence files; nothing else that lies in the folder. A README.md in the folder is pushed as it is; without
    one, a card is written (see `hf_linattn.publish.card.model_card`). The first commit holds the model, the second the
    card, which names the first. What is on the Hub already is not sent again: repeat a push that was interrupted.

    Args:
        folder: the checkpoint.
        config: where to, and what goes on the card.
        token: of the Hub. Default: the one that `hf auth login` saved, or HF_TOKEN.

    Raises:
        FileNotFoundError: the folder, its config, weights or one of its modelling files is missing.
        ValueError: the folder is no converted checkpoint, is damaged or newer than this package, gives outputs that
            are not finite, or base model or licence are not known.
        FileExistsError: the repository holds something else than a converted model.
        PermissionError: there is no token, or it does not allow it.
        ConnectionError: the Hub cannot be reached, or the upload stopped in the middle.
    """
    folder = Path(folder)
    files = check_folder(folder)
    cleaned = cleaned_files(folder, files)
    values = json.loads((folder / "config.json").read_text())
    own_card = (folder / "README.md").is_file()
    if own_card and config.report is not None:
        raise ValueError(
            f"report={config.report!r}: {str(folder)!r} has a README.md of its own, which is pushed as it is. Remove "
            "that file to have a card written, or leave the report out."
        )
    report = None if config.report is None else read_report(config.report)

    api = HfApi(token=token)
    if config.dry_run and "/" in config.repo and (token or get_token()) is None:
        # nothing is sent, and the owner is named: no account is needed
        repo_id, existing = config.repo, None
    else:
        repo_id = _repo_id(api, config.repo)
        existing = _existing(api, repo_id, config.private)
    card: Callable[[str], Any] | None = None
    if not own_card:
        base_model, metadata = _base(api, values, config)
        datasets = _known(api, named_datasets(folder, report))

        def card(revision: str) -> Any:
            return model_card(
                folder,
                repo_id=repo_id,
                revision=revision,
                base_model=base_model,
                metadata=metadata,
                report=report,
                datasets=datasets,
            )

        # what the Hub would refuse is known before anything is sent
        _reach(api, card("0" * 40).validate)
    load_afresh(folder)
    for name in cleaned:
        logger.warning(f"{name} is pushed with names in place of paths of this machine.")
    url = f"{api.endpoint}/{repo_id}"
    if config.dry_run:
        branch = config.revision or "main"
        text = (folder / "README.md").read_text(encoding="utf-8") if card is None else str(card(branch))
        if card is not None:
            write_text(folder / DRY_CARD, text)
        return Pushed(repo_id, branch, url, text, files)

    if existing is None:
        _reach(api, lambda: api.create_repo(repo_id, private=config.private))
    if config.revision is not None:
        _reach(api, lambda: api.create_branch(repo_id, branch=str(config.revision), exist_ok=True))
    logger.warning(f"To {repo_id} go: {', '.join(files)}")
    commit = _upload(api, repo_id, config, {name: cleaned.get(name, folder / name) for name in files}, replace=True)
    if card is None:
        return Pushed(repo_id, commit.oid, url, (folder / "README.md").read_text(encoding="utf-8"), files)
    written = card(commit.oid)
    beside: dict[str, Path | bytes] = {"README.md": str(written).encode()}
    for plot in [] if config.report is None else plots_of(config.report):
        beside[f"{PLOTS}/{plot.name}"] = inside(plot.parent, plot.name, file=plot.name, field="file")
    _upload(api, repo_id, config, beside)
    return Pushed(repo_id, commit.oid, url, str(written), files)


def _reach(api: HfApi, call: Callable[[], _T]) -> _T:
    """`call`, its errors with the network as one kind that says what to do."""
    try:
        return call()
    except LocalTokenNotFoundError as error:
        raise PermissionError("There is no token of the Hub: `hf auth login`, or set HF_TOKEN.") from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise PermissionError(f"The Hub does not allow it with this token: {_line(error)}") from error
        raise
    except (OSError, ValueError):
        raise
    except Exception as error:
        # the client's own classes for this have changed with its HTTP library
        raise ConnectionError(f"The Hub at {api.endpoint} cannot be reached: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _repo_id(api: HfApi, name: str) -> str:
    """The name with its owner, who must be known to the Hub."""
    owner = _reach(api, api.whoami)["name"]
    return name if "/" in name else f"{owner}/{name}"


def _existing(api: HfApi, repo_id: str, private: bool | None) -> ModelInfo | None:
    """What the Hub knows of the repository, None where there is none.

    Raises:
        FileExistsError: it is there, and is not what a push may add to.
    """

    def ask() -> ModelInfo | None:
        try:
            return api.model_info(repo_id)
        except RepositoryNotFoundError:
            return None

    info = _reach(api, ask)
    if info is None:
        return None
    if private is not None and bool(info.private) != private:
        raise FileExistsError(
            f"private={private}: {repo_id} exists and is {'private' if info.private else 'public'}, which a push does "
            "not change. Leave the option out, or change the repository's settings on the Hub first."
        )
    files = {sibling.rfilename for sibling in info.siblings or []}
    model_type = ""
    if "config.json" in files:
        with tempfile.TemporaryDirectory() as scratch:
            path = _reach(api, lambda: api.hf_hub_download(repo_id, "config.json", local_dir=scratch))
            model_type = str(json.loads(Path(path).read_text(encoding="utf-8")).get("model_type"))
    if files - _EMPTY and not model_type.startswith(MODEL_TYPE_PREFIX):
        raise FileExistsError(
            f"{repo_id} exists and holds something else than a converted model"
            f"{f' (model_type={model_type!r})' if model_type else ''}; choose another name."
        )
    return info


def _base(api: HfApi, values: dict[str, Any], config: PushConfig) -> tuple[str | None, dict[str, Any]]:
    """Hub id of the base model, None where it is not on the Hub, and what its card hands on: its licence above all."""
    recorded = values.get("linattn_base") or {}
    base_model = config.base_model or recorded.get("name")
    if base_model is None:
        raise ValueError(
            "base_model: the checkpoint does not say what it was converted from. Pass the Hub id (--base-model), or "
            "'local' where the base is not on the Hub."
        )
    metadata: dict[str, Any] = {}
    if base_model == "local":
        base_model = None
    else:
        try:
            carried = api.model_info(base_model).card_data
            metadata = {} if carried is None else {key: carried.get(key) for key in CARRIED if carried.get(key)}
        except RepositoryNotFoundError as error:
            raise ValueError(
                f"base_model={base_model!r} is not on the Hub, or this token may not see it; where the base is not on "
                "the Hub, pass 'local'."
            ) from error
    if config.license is not None:
        metadata = {key: value for key, value in metadata.items() if not key.startswith("license")}
        metadata["license"] = config.license
    elif "license" not in metadata and "license" in recorded:
        metadata["license"] = recorded["license"]
    if "license" not in metadata:
        raise ValueError(
            f"license: {base_model or 'the checkpoint'} names none, and none is guessed. Pass it (--license) as the "
            "Hub names it, such as apache-2.0, mit, or other."
        )
    return base_model, metadata


def _known(api: HfApi, datasets: Iterable[str]) -> set[str]:
    """Those of the ids that the Hub has a data set of."""
    known = set()
    for dataset in datasets:
        with contextlib.suppress(HfHubHTTPError):
            _reach(api, functools.partial(api.dataset_info, dataset))
            known.add(dataset)
    return known


def _upload(
    api: HfApi, repo_id: str, config: PushConfig, files: Mapping[str, Path | bytes], *, replace: bool = False
) -> CommitInfo:
    """One commit of exactly these files: path in the repository -> file, or its content.

    Args:
        replace: remove what an earlier push left, and this one has no use for.
    """
    try:
        operations: list[Any] = [CommitOperationAdd(path, content) for path, content in files.items()]
        if replace:
            for path in api.list_repo_files(repo_id, revision=config.revision):
                left = any(fnmatch.fnmatch(path, pattern) for pattern in _REPLACED)
                if left and path not in files:
                    operations.append(CommitOperationDelete(path))
        return api.create_commit(repo_id, operations, commit_message=config.message, revision=config.revision)
    # every way of uploading has errors of its own
    except Exception as error:
        raise ConnectionError(
            f"The upload to {repo_id} stopped: {_line(error)}. Push again: what is there already is not sent twice."
        ) from error
