"""Names that come out of a checkpoint's own files stay inside its folder."""

from pathlib import Path

import pytest

from hf_linattn.conversion.checkpoint_files import check_checkpoint, sentence_module_folders
from hf_linattn.utils.files import inside


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "secret").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["../private", "/etc/passwd", "a/../../private/secret", "link", 3])
def test_what_leads_out_of_the_folder_is_named(folder: Path, name: str) -> None:
    (folder / "link").symlink_to("../private/secret")
    with pytest.raises(ValueError, match=r"modules\.json': path=.*within the folder|is a link that leads out"):
        inside(folder, name, file="modules.json", field="path")


def test_names_and_links_within_the_folder_are_followed(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "link").symlink_to("config.json")
    for name in ("config.json", "link", "a/../config.json"):
        assert inside(folder, name, file="x", field="y").is_file()


def test_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    for place in (repository / "snapshots" / "abc", repository / "blobs", tmp_path / "blobs" / "ab"):
        place.mkdir(parents=True)
    (repository / "blobs" / "own").write_text("{}")
    (tmp_path / "blobs" / "ab" / "shared").write_text("{}")
    (repository / "blobs" / "of all").symlink_to("../../blobs/ab/shared")
    snapshot = repository / "snapshots" / "abc"
    (snapshot / "config.json").symlink_to("../../blobs/own")
    (snapshot / "model.safetensors").symlink_to("../../blobs/of all")
    check_checkpoint(snapshot)


@pytest.mark.parametrize(
    "link", ["../../../models--org--private/blobs/x", "../../../blobs/ab/shared", "../../refs/main"]
)
def test_links_of_the_cache_to_what_is_not_a_blob_of_the_repository_are_refused(link: str, tmp_path: Path) -> None:
    """Another, private repository lies in the same cache; the shared store is reached by a blob of one's own only."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    for place in (snapshot, tmp_path / "models--org--private" / "blobs", tmp_path / "blobs" / "ab"):
        place.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(link)
    target = snapshot / link
    target.parent.mkdir(exist_ok=True)
    target.write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json.*is a link that leads out"):
        check_checkpoint(snapshot)


def test_paths_of_another_machine_that_are_nothing_here_are_none(folder: Path) -> None:
    """Older versions of Transformers left them in what they wrote."""
    (folder / "tokenizer_config.json").write_text('{"tokenizer_file": "/nobody/tokenizer.json", "x_file": null}')
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    check_checkpoint(folder)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        (
            "tokenizer_config.json",
            '{"auto_map": {"AutoTokenizer": ["../private.T", null]}}',
            r"auto_map\['AutoTokenizer'\]=",
        ),
        ("tokenizer_config.json", '{"vocab_file": "/etc/passwd"}', r"vocab_file='/etc/passwd' leads out"),
        (
            "adapter_config.json",
            '{"base_model_name_or_path": "../private"}',
            r"base_model_name_or_path='.*private' leads",
        ),
        ("adapter_config.json", '{"base_model_name_or_path": "/etc"}', r"base_model_name_or_path='/etc' leads out"),
        ("modules.json", '[{"path": "../private"}]', r"modules\.json': path='\.\./private'"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "../private/secret"}}', r"weight_map\['w'\]="),
        ("config.json", '{"auto_map": {"AutoModel": "/etc/code.Model"}}', r"auto_map\['AutoModel'\]="),
    ],
)
def test_every_file_that_names_others_is_looked_at(folder: Path, file: str, content: str, told: str) -> None:
    check_checkpoint(folder)
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=told):
        check_checkpoint(folder)


def test_a_link_among_the_tokenizer_files_is_refused(folder: Path) -> None:
    (folder / "merges.txt").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"merges\.txt.*is a link that leads out"):
        check_checkpoint(folder)


def test_a_link_in_a_module_of_a_sentence_encoder_is_refused(folder: Path) -> None:
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling/"}]')
    (folder / "1_Pooling").mkdir()
    assert sentence_module_folders(folder) == ["1_Pooling"]
    (folder / "1_Pooling" / "config.json").symlink_to("../../private/secret")
    with pytest.raises(ValueError, match="is a link that leads out"):
        sentence_module_folders(folder)
