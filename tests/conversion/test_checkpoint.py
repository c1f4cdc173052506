"""`convert_checkpoint`: complete folders or none."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, GenerationConfig

import hf_linattn.conversion.checkpoint as checkpoint_module
from hf_linattn import PerformerConfig, convert_checkpoint

from ..helpers import VOCABULARY, inputs_for, outputs_of, save_tokenizer, tiny_model

pytestmark = pytest.mark.core

CONFIG = PerformerConfig(num_features=16)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with weights, tokenizer and generation config; its name has a space."""
    folder = tmp_path / "a checkpoint"
    save_tokenizer(folder)
    tiny_model().save_pretrained(folder)
    GenerationConfig(max_new_tokens=7).save_pretrained(folder)
    return folder


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_is_a_complete_repository(checkpoint: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    output = tmp_path / "new" / "with a space"
    model = convert_checkpoint(checkpoint, output, CONFIG, max_length=128)
    expected = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "modeling_linattn.py",
        "configuration_linattn.py",
    }
    assert expected <= set(listing(output))
    assert listing(output.parent) == ["with a space"]
    assert GenerationConfig.from_pretrained(output).max_new_tokens == 7
    loaded, inputs = AutoModel.from_pretrained(output), inputs_for("AutoModel")
    assert torch.equal(outputs_of(loaded, inputs), outputs_of(model, inputs))
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_a_checkpoint_without_tokenizer_is_converted_with_a_warning(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    convert_checkpoint(tmp_path / "base", tmp_path / "out", CONFIG)
    assert "config.json" in listing(tmp_path / "out")
    assert "tokenizer.json" not in listing(tmp_path / "out")


def test_a_tokenizer_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    tiny_model(vocab_size=VOCABULARY - 3).save_pretrained(checkpoint)
    with pytest.raises(ValueError, match=r"token 'w97' the id 97, and the model's vocab_size=97 allows 0 to 96: it is"):
        convert_checkpoint(checkpoint, tmp_path / "out", CONFIG)
    assert not (tmp_path / "out").exists()


def test_an_added_token_that_the_model_does_not_know_is_warned_of(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(checkpoint)
    convert_checkpoint(checkpoint, tmp_path / "out", CONFIG)
    assert f"'<new>' the id {VOCABULARY}, and the model's vocab_size={VOCABULARY}" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["convert", "_save_tokenizer", "_save_generation_config"])
def test_what_fails_leaves_nothing_behind(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error("in the middle")

    before = listing(tmp_path)
    monkeypatch.setattr(checkpoint_module, step, fail)
    with pytest.raises(error, match="in the middle"):
        convert_checkpoint(checkpoint, tmp_path / "out", CONFIG)
    assert listing(tmp_path) == before


_LIMITED = """
import resource, sys
from hf_linattn import LinAttnPreTrainedModel
from hf_linattn.cli.main import main
save = LinAttnPreTrainedModel.save_pretrained
def limit():
    # what a full disk is
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
def limited(model, *arguments, **options):
    if sys.argv[1] == "weights":
        limit()
    save(model, *arguments, **options)
    limit()
LinAttnPreTrainedModel.save_pretrained = limited
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("full_for", ["weights", "tokenizer"])
def test_a_full_disk_names_the_output_folder(checkpoint: Path, tmp_path: Path, full_for: str) -> None:
    before, output = listing(tmp_path), str(tmp_path / "out")
    call = ["convert", str(checkpoint), "--method", "performer", "--output", output]
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, full_for, *call], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    told = f"hf-linattn: output_dir='{output}': the disk is full; make room, or write somewhere else."
    assert done.stderr.splitlines()[-1].endswith(told) and "Traceback" not in done.stderr
    assert listing(tmp_path) == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_for_the_generation_config(
    checkpoint: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(number, "full", "generation_config.json")

    monkeypatch.setattr(GenerationConfig, "save_pretrained", full)
    with pytest.raises(OSError, match=r"output_dir='.*out': the disk is full"):
        convert_checkpoint(checkpoint, tmp_path / "out", CONFIG)


def test_only_a_folder_that_was_filled_meanwhile_is_another_process(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoint_module._put_in_place

    def put(*arguments: object) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "other").touch()
        original(*arguments)

    monkeypatch.setattr(checkpoint_module, "_put_in_place", put)
    with pytest.raises(FileExistsError, match="written by another process"):
        convert_checkpoint(checkpoint, tmp_path / "out", CONFIG)
    monkeypatch.setattr(checkpoint_module, "_put_in_place", original)

    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError, match="not here"):
        convert_checkpoint(checkpoint, tmp_path / "another", CONFIG)


def test_what_fails_leaves_the_old_folder_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_checkpoint(checkpoint, tmp_path / "out", CONFIG)
    (tmp_path / "out" / "mine").write_text("kept")
    monkeypatch.setattr(checkpoint_module, "_save_tokenizer", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert_checkpoint(checkpoint, tmp_path / "out", CONFIG, overwrite=True)
    assert (tmp_path / "out" / "mine").read_text() == "kept"


def test_only_an_earlier_conversion_is_replaced_and_only_when_asked(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine").write_text("kept")
    with pytest.raises(FileExistsError, match=r"out.*not empty.*overwrite=True"):
        convert_checkpoint(checkpoint, output, CONFIG)
    with pytest.raises(FileExistsError, match=r"out.*something else"):
        convert_checkpoint(checkpoint, output, CONFIG, overwrite=True)
    assert listing(output) == ["mine"]
    (output / "mine").unlink()
    convert_checkpoint(checkpoint, output, CONFIG)
    with pytest.raises(FileExistsError, match="not empty"):
        convert_checkpoint(checkpoint, output, CONFIG)
    convert_checkpoint(checkpoint, output, CONFIG, max_length=128, overwrite=True)
    assert json.loads((output / "config.json").read_text())["linattn"]["max_length"] == 128
    assert listing(tmp_path) == ["a checkpoint", "out"]


def test_a_link_is_followed(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    for overwrite in (False, True):
        convert_checkpoint(checkpoint, tmp_path / "link", CONFIG, overwrite=overwrite)
        assert (tmp_path / "link").is_symlink()
        assert "config.json" in listing(tmp_path / "target")
        assert listing(tmp_path) == ["a checkpoint", "link", "target"]


def test_what_holds_the_checkpoint_is_never_the_output(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contains the checkpoint"):
        convert_checkpoint(checkpoint, tmp_path, CONFIG, overwrite=True)
    assert listing(tmp_path) == ["a checkpoint"]


def test_a_loaded_model_is_sent_to_convert(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"BertModel.*convert\(\)"):
        convert_checkpoint(tiny_model(), tmp_path / "out", CONFIG)


def test_a_sentence_encoder_keeps_its_other_modules(minilm: Path, tmp_path: Path) -> None:
    convert_checkpoint(minilm, tmp_path / "out", CONFIG, max_length=1024)
    for name in ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"):
        assert (tmp_path / "out" / name).read_bytes() == (minilm / name).read_bytes()
    settings = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert settings["max_seq_length"] == 1024


def test_an_empty_folder_is_filled(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert_checkpoint(checkpoint, tmp_path / "out", CONFIG)
    assert "config.json" in listing(tmp_path / "out")


def test_a_folder_filled_meanwhile_is_not_replaced(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two conversions into one folder: the first to finish wins, whatever the check at the start has seen."""
    output = tmp_path / "out"

    def other_process(*args: object) -> None:
        output.mkdir()
        (output / "theirs").write_text("kept")

    monkeypatch.setattr(checkpoint_module, "_save_generation_config", other_process)
    with pytest.raises(OSError):
        convert_checkpoint(checkpoint, output, CONFIG)
    assert listing(output) == ["theirs"]
    assert listing(tmp_path) == ["a checkpoint", "out"]


@pytest.mark.parametrize("spelling", ["{}", "{}/", "{}/../a checkpoint"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_checkpoint_itself_is_never_the_output(checkpoint: Path, spelling: str, overwrite: bool) -> None:
    before = listing(checkpoint)
    with pytest.raises(ValueError, match="checkpoint itself"):
        convert_checkpoint(checkpoint, spelling.format(checkpoint), CONFIG, overwrite=overwrite)
    assert listing(checkpoint) == before


def test_a_file_is_no_folder(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileExistsError, match="is a file"):
        convert_checkpoint(checkpoint, tmp_path / "file", CONFIG, overwrite=True)
    assert (tmp_path / "file").read_text() == "kept"


def test_bad_settings_fail_before_anything_is_written(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_length=3"):
        convert_checkpoint(checkpoint, tmp_path / "new" / "out", CONFIG, max_length=3)
    assert listing(tmp_path) == ["a checkpoint"]


def test_two_processes_into_one_folder_leave_one_complete_model(checkpoint: Path, tmp_path: Path) -> None:
    package = Path(checkpoint_module.__file__).parents[1]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from hf_linattn import PerformerConfig, convert_checkpoint\n"
        "convert_checkpoint(sys.argv[2], sys.argv[3], PerformerConfig(num_features=16))"
    )
    command = [sys.executable, "-c", code, str(package), str(checkpoint), str(tmp_path / "out")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert 0 in codes, errors
    assert all(code == 0 or "not empty" in error for code, error in zip(codes, errors, strict=True)), errors
    assert listing(tmp_path) == ["a checkpoint", "out"]
    assert AutoModel.from_pretrained(tmp_path / "out")(**inputs_for("AutoModel")).last_hidden_state.isfinite().all()


def test_a_module_outside_the_folder_is_refused(tmp_path: Path) -> None:
    """What lies beside a checkpoint is not copied, whatever its modules.json says."""
    source, private = tmp_path / "source", tmp_path / "private"
    tiny_model("bert").save_pretrained(source)
    private.mkdir()
    (private / "key.txt").write_text("secret")
    (source / "modules.json").write_text('[{"path": ""}, {"path": "../private"}]')
    with pytest.raises(ValueError, match=r"modules.json': path='../private' leads out of the folder"):
        convert_checkpoint(source, tmp_path / "output", PerformerConfig(num_features=16))
    assert not (tmp_path / "output").exists() and [path.name for path in private.iterdir()] == ["key.txt"]


def test_a_link_out_of_a_subfolder_is_refused(tmp_path: Path) -> None:
    """A subfolder is checked as the checkpoint that it is."""
    outside, source = tmp_path / "outside", tmp_path / "source"
    tiny_model("bert").save_pretrained(outside)
    tiny_model("bert").save_pretrained(source / "sub")
    (source / "sub" / "config.json").unlink()
    (source / "sub" / "config.json").symlink_to(outside / "config.json")
    with pytest.raises(ValueError, match=r"'config.json' is a link that leads out of the folder"):
        convert_checkpoint(source, tmp_path / "output", PerformerConfig(num_features=16), subfolder="sub")
    assert not (tmp_path / "output").exists()
