"""The command line: the options are those of the dataclasses, errors are one line, and what it did is printed."""

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModel

from hf_linattn import LinformerConfig, PerformerConfig, convert
from hf_linattn.cli.main import COMMANDS, main

from ..helpers import save_tokenizer, tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "base model"
    tiny_model().save_pretrained(folder)
    return folder


def test_convert_writes_what_python_would(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out put"
    options = (
        "--method performer --num-features 16 --window-size 8 --max-length 256 --no-orthogonal --layers 0 --seed 3"
    )
    assert main(["convert", str(checkpoint), "--output", str(output), *options.split()]) == 0
    printed = capsys.readouterr().out
    for part in ("1 of 2", "parameters added", "256", "fewer operations"):
        assert part in printed
    config = PerformerConfig(num_features=16, window_size=8, orthogonal=False, layers=[0], seed=3)
    expected = convert(str(checkpoint), config, max_length=256)
    found = AutoModel.from_pretrained(output)
    assert found.config.linattn == expected.config.linattn
    for name, tensor in expected.state_dict().items():
        assert tensor.equal(found.state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "linformer", "--num-features", "8"], "--num-features: not an option of --method linformer"),
        (["--method", "performer", "--num-features", "0"], "num_features=0"),
        (["--method", "performer", "--max-length", "3"], "max_length=3"),
        (["--method", "performer", "--layers", "7"], "layers=[7]"),
    ],
)
def test_bad_values_are_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    output = tmp_path / "out"
    assert main(["convert", str(checkpoint), "--output", str(output), *options]) == 1
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert not output.exists()


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "none"), "--method", "linformer", "--output", str(tmp_path / "out")]) == 1
    assert "There is no folder" in capsys.readouterr().err


def test_a_choice_that_does_not_exist_lists_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["convert", "x", "--method", "performer", "--output", "y", "--feature-map", "cosine"])
    assert "trigonometric" in capsys.readouterr().err


def test_the_command_alone_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["covert", "x"], "there is no command 'covert'; did you mean convert?"),
        (["frobnicate"], "there is no command 'frobnicate': convert, analyze, evaluate, adapt, push"),
        (["convert", "x", "--method", "linformer", "--output", "y", "--window", "8"], "no option --window; did you"),
        (["convert", "x", "--methd", "linformer", "--output", "y"], "--methd; did you mean --method?"),
        # which would be told to be missing
        (["convert", "x", "--ouput=y"], "no option --ouput; did you mean --output?"),
        (["evaluate", "x", "--window_size", "8"], "there is no option --window_size; hf-linattn evaluate --help"),
        (["adapt", "x"], "hf-linattn adapt --help describes the options"),
        (["convert", "x", "--output", "y", "--max-length", "long"], "argument --max-length: invalid int value: 'long'"),
    ],
)
def test_a_mistyped_name_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    if "--window" in arguments:
        assert "did you mean --window-size?" in error


def test_an_interrupt_during_the_imports_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["convert", "x", "--method", "linformer", "--output", "y"]) == 130
    assert capsys.readouterr().err == "hf-linattn: interrupted; nothing was written.\n"


@pytest.mark.parametrize(
    "call",
    [
        ["convert", "{model}", "--method", "linformer", "--output", "out"],
        ["adapt", "{model}", "--dataset", "{texts}", "--output", "out"],
        ["evaluate", "{model}", "--task", "embeddings", "--dataset", "{texts}", "--output", "out"],
        ["analyze", "{model}", "--dataset", "{texts}", "--output", "out"],
    ],
    ids=lambda call: call[0],
)
def test_a_hub_id_that_cannot_be_reached_is_one_line(
    call: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "w5"}\n')
    names = {"model": "nobody/nothing", "texts": str(tmp_path / "texts.jsonl")}
    assert main([argument.format(**names) for argument in call]) == 1
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-linattn:")]
    assert told and told[-1].startswith("hf-linattn: 'nobody/nothing' is no folder, and no Hub id that can be reached")
    assert capsys.readouterr().err.count("offline mode") == 0


@pytest.mark.parametrize("command", ["convert", "adapt", "evaluate", "analyze"])
def test_a_file_of_another_encoding_is_named_by_its_line(
    command: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, output = tmp_path / "texts.jsonl", str(tmp_path / "output")
    texts.write_bytes('{"text": "w5 w6"}\n{"text": "café"}\n'.encode("latin-1"))
    save_tokenizer(checkpoint)
    if command == "adapt":
        options = ["--method", "linformer", "--projection", "mean"]
        assert main(["convert", str(checkpoint), *options, "--output", str(tmp_path / "converted")]) == 0
    model = str(tmp_path / "converted" if command == "adapt" else checkpoint)
    options = {
        "convert": ["--method", "linformer", "--calibration-dataset"],
        "adapt": ["--transfer-steps", "1", "--distil-steps", "1", "--sequence-length", "16", "--dataset"],
        "evaluate": ["--task", "embeddings", "--lengths", "16", "--dataset"],
        "analyze": ["--dataset"],
    }[command]
    assert main([command, model, "--output", output, *options, str(texts)]) == 1
    assert f"hf-linattn: '{texts}', line 2: byte 0xe9 is no UTF-8" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "has no rows"),
        ("\n\n", "has no rows"),
        ('{"other": "w5 w6"}\n', "there is no column 'text'; there are 'other'"),
        ('{"text": ""}\n{"text": null}\n', "no document with text is left (2 without any)"),
        ('{"text": 3}\n', "line 1: text_column='text' holds int '3'"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "adapt", "evaluate", "analyze"])
def test_documents_that_are_none_are_one_line(
    command: str, content: str, told: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, output = tmp_path / "texts.jsonl", tmp_path / "output"
    texts.write_text(content)
    save_tokenizer(checkpoint)
    if command == "adapt":
        convert(str(checkpoint), LinformerConfig(projection="mean")).save_pretrained(tmp_path / "converted")
        save_tokenizer(tmp_path / "converted")
    model = str(tmp_path / "converted" if command == "adapt" else checkpoint)
    options = {
        "convert": ["--method", "linformer", "--projection", "learned", "--calibration-dataset"],
        "adapt": ["--transfer-steps", "1", "--distil-steps", "1", "--sequence-length", "16", "--dataset"],
        "evaluate": ["--task", "embeddings", "--lengths", "16", "--dataset"],
        "analyze": ["--dataset"],
    }[command]
    assert main([command, model, "--output", str(output), *options, str(texts)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hf-linattn: ") and told in error and str(texts) in error
    # nothing that could be taken for a result
    assert not [path for path in output.glob("*") if path.name in ("config.json", "report.json", "analysis.json")]


@pytest.mark.parametrize("call", [["-m", "hf_linattn"], ["scripts/convert.py"]])
def test_help_describes_every_field(call: list[str]) -> None:
    command = [sys.executable, *call, *(["convert"] if call[0] == "-m" else []), "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    words = " ".join(done.stdout.split())
    for config in (LinformerConfig, PerformerConfig):
        for field in dataclasses.fields(config):
            assert f"--{field.name.replace('_', '-')}" in words
            assert " ".join(field.metadata["help"].split()[:5]) in words


@pytest.mark.parametrize("command", COMMANDS)
def test_the_main_options_come_first_and_fit_on_a_screen(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert len(text.split("\nadvanced: ")[0].splitlines()) <= 40
    options = importlib.import_module(f"hf_linattn.cli.{command}").MAIN
    places = [text.index(f"\n  --{name.replace('_', '-')}") for name in options]
    assert places == sorted(places) and places[-1] < text.index("\nadvanced: ")
    assert "[options]" in text.splitlines()[0]
    assert (ROOT / text.partition("documentation: ")[2].split()[0]).is_file()


def test_adapt_says_where_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    """What it says are options that it has."""
    with pytest.raises(SystemExit):
        main(["adapt", "--help"])
    start, _, rest = capsys.readouterr().out.partition("documentation: ")
    named = {word for word in start.partition("where to start:")[2].split() if word.startswith("--")}
    assert len(named) > 5 and all(f"\n  {name}" in rest for name in named)


def test_documents_have_one_name(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an earlier version called texts still is understood, and no longer shown."""
    for command in ("analyze", "evaluate", "adapt"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        printed = capsys.readouterr().out
        assert "\n  --dataset DATASET" in printed and "--texts" not in printed
    assert main(["analyze", str(checkpoint), "--texts", "nofile.jsonl", "--output", str(tmp_path / "out")]) == 1
    assert "nofile.jsonl" in capsys.readouterr().err


def test_a_name_that_is_nothing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "nofolder", "--method", "linformer", "--output", str(tmp_path / "out")]) == 1
    assert "'nofolder' is no folder" in capsys.readouterr().err


def test_damaged_weights_are_one_line(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["convert", str(checkpoint), "--method", "linformer", "--output", str(tmp_path / "out")]) == 1
    assert f"weights of '{checkpoint}' are damaged" in capsys.readouterr().err
