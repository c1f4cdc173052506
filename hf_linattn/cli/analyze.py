"""`hf-linattn analyze`: look at a checkpoint's attention, and suggest what to convert with what."""

import argparse
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ..analyze import CANDIDATES, DECODER_CANDIDATES, Analysis, AnalyzeConfig, Check, analyze, suggest
from ..analyze.config import candidates_for
from ..analyze.report import layer_table, left_out_text, suggestion_text, write_report, written_text
from ..analyze.retrieval import DEFAULT_TEXTS
from ..analyze.suggest import BUDGETS, check_wanted
from ..data.documents import DataConfig, load_documents
from ..modeling.configuration_linattn import AttentionConfig
from ..utils.labels import checkpoint_name
from .options import add_option_groups, taken

MAIN = ("dataset", "output", "length", "operations", "fidelity")


@dataclass(kw_only=True)
class AnalyzeOptions:
    """Options of `hf-linattn analyze` beside those of the data and the analysis."""

    output: str = field(
        metadata={"help": "Folder of the report. An analysis of the same settings that is there is not made again."}
    )
    dataset: str | None = field(default=None, metadata=DataConfig.__dataclass_fields__["dataset"].metadata)
    candidates: list[str] | None = field(
        default=None,
        metadata={
            "help": f"Settings to try. Default: all of {', '.join(map(repr, CANDIDATES))}; of a decoder all of "
            f"{', '.join(map(repr, DECODER_CANDIDATES))}."
        },
    )
    time: float | None = field(
        default=None,
        metadata={"help": "Suggest for this budget: time of the whole model, relative to softmax at --length."},
    )
    memory: float | None = field(
        default=None, metadata={"help": "The same for the memory of an attention layer, of which softmax takes least."}
    )
    operations: float | None = field(
        default=None, metadata={"help": "The same for the operations of the whole model, counted and not timed."}
    )
    fidelity: float | None = field(
        default=None,
        metadata={"help": "Suggest the cheapest choice with this cosine (encoders) or KL divergence (decoders)."},
    )
    retrieval: float | None = field(
        default=None,
        metadata={
            "help": "Heads that find planted tokens stay softmax: those with the largest retrieval scores, which "
            f"together have this share of all. They count in the budget. Without --retrieval-texts, {DEFAULT_TEXTS} "
            "texts are read for the scores."
        },
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("model", metavar="ID_OR_FOLDER", help="Hub id or folder of the softmax checkpoint.")
    add_option_groups(parser, MAIN, {"suggestion": AnalyzeOptions, "data": DataConfig, "analysis": AnalyzeConfig})
    # what --dataset was called before
    parser.add_argument("--texts", dest="dataset", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.set_defaults(command_line="")


def run(given: dict[str, Any]) -> None:
    """Analyze, or take the analysis that is there; suggest if asked for; write the report."""
    options, command = taken(given, AnalyzeOptions), given.pop("command_line")
    model = given.pop("model")
    asked = sorted(given)
    selection = {f.name: given.pop(f.name) for f in dataclasses.fields(DataConfig) if f.name in given}
    if options.retrieval is not None and options.dataset is not None:
        given.setdefault("retrieval_texts", DEFAULT_TEXTS)
    config = taken(given, AnalyzeConfig)
    kept = Path(options.output) / "analysis.json"
    name, check = checkpoint_name(model), None
    wanted = {unit: getattr(options, unit) for unit in (*BUDGETS, "fidelity")}
    suggesting = any(value is not None for value in wanted.values())
    if suggesting:
        check_wanted(wanted, options.retrieval)
    elif options.retrieval is not None:
        raise ValueError(f"--retrieval {options.retrieval} needs a budget or a fidelity, such as --operations.")
    if options.dataset is not None:
        candidates = _chosen(options.candidates, AutoConfig.from_pretrained(model).model_type)
        documents = load_documents(DataConfig(dataset=options.dataset, **selection))
        texts = [document.text for document in documents.documents]
        earlier = _earlier(kept)
        same = earlier is not None and (earlier.model, earlier.config, earlier.names) == (name, config, [*candidates])
        analysis = earlier if same and earlier else None
        if analysis is None:
            analysis = analyze(model, texts, config, candidates=candidates, operations=options.operations)
        if suggesting:
            # kept also where nothing can be suggested
            write_report(analysis, options.output, command=command)
            check = Check(model, texts, analysis)
    elif kept.exists():
        analysis = Analysis.load(kept)
        if asked or options.candidates or analysis.model != name:
            raise ValueError(
                f"{str(kept)!r} is an analysis of {analysis.model!r} at {analysis.length:,} tokens; give --dataset for "
                "one of another model, other candidates or other settings, or leave these out."
            )
    else:
        raise ValueError(f"--dataset is missing, and {options.output!r} has no analysis to go on from.")
    suggestion = suggest(analysis, **wanted, retrieval=options.retrieval, check=check) if suggesting else None
    write_report(analysis, options.output, suggestion=suggestion, command=command)
    if analysis.left_out:
        print(left_out_text(analysis))
    print(layer_table(analysis) if suggestion is None else suggestion_text(analysis, suggestion))
    print(f"\n{written_text(options.output, suggestion)}")


def _earlier(path: Path) -> Analysis | None:
    """What was left of another start; what cannot be read is made again."""
    try:
        return Analysis.load(path) if path.exists() else None
    except ValueError:
        return None


def _chosen(names: list[str] | None, model_type: str) -> dict[str, AttentionConfig]:
    known = candidates_for(model_type)
    if unknown := [name for name in names or [] if name not in known]:
        raise ValueError(f"--candidates {', '.join(map(repr, unknown))} is not among {', '.join(map(repr, known))}.")
    return known if names is None else {name: known[name] for name in names}
