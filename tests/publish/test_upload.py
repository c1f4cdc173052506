"""`push`: through huggingface_hub's own client to a server that speaks the Hub's HTTP calls, and back."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import transformers.utils.hub
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, GenerationConfig

import hf_linattn
import hf_linattn.publish.upload
from hf_linattn import LinformerConfig, convert, convert_checkpoint
from hf_linattn.cli.main import main
from hf_linattn.publish import PushConfig, push
from hf_linattn.publish.checks import load_afresh

from ..helpers import converted_model, inputs_for, save_tokenizer, tiny_model
from .hub_server import TOKEN, Fault, Hub, Repo, serve

MASKED_LM = "AutoModelForMaskedLM"
CONFIG = LinformerConfig(projection="learned", projection_length=8, window_size=4, global_tokens=1)
#: what every push here needs to know beside the repository's name
LOCAL = {"base_model": "local", "license": "mit"}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted masked language model with tokenizer and generation config; tests copy it."""
    root = tmp_path_factory.mktemp("hub")
    save_tokenizer(root / "base")
    tiny_model("bert", MASKED_LM).save_pretrained(root / "base")
    GenerationConfig(max_new_tokens=7).save_pretrained(root / "base")
    convert_checkpoint(root / "base", root / "converted", CONFIG, max_length=128)
    return root / "converted"


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "a model"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A running Hub, which this process is logged in to."""
    with serve() as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        # made from the former when it was imported
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        # made when it is first asked for, by whatever test came before
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        yield running


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the load in a fresh process, which takes seconds: for tests of what comes after it."""
    monkeypatch.setattr(hf_linattn.publish.upload, "load_afresh", lambda folder: None)


def client(
    code: str, *arguments: Path | str, cwd: Path, hub: Hub, token: str = "", offline: bool = False
) -> subprocess.CompletedProcess[str]:
    """`code` in a fresh interpreter whose Hub is the server, with a cache below `cwd`."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cwd / "home"),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_TOKEN": token,
        "NO_PROXY": "127.0.0.1,localhost",
    }
    return subprocess.run(
        [sys.executable, "-I", "-c", code, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


LOAD = """
import sys
sys.modules["hf_linattn"] = None  # any import of it fails
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer
name, revision, inputs, outputs = sys.argv[1:]
model = AutoModelForMaskedLM.from_pretrained(name, revision=revision, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=True)
assert tokenizer("w7 w8").input_ids == [2, 7, 8, 3], tokenizer("w7 w8")
torch.set_num_threads(1)
with torch.no_grad():
    save_file({"logits": model(**load_file(inputs)).logits}, outputs)
"""


def expected_logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForMaskedLM.from_pretrained(folder)(**inputs_for(MASKED_LM)).logits


def test_a_pushed_model_loads_by_name_without_the_package_and_then_offline(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    pushed = push(folder, PushConfig(repo="model", private=True, **LOCAL))
    assert pushed.repo_id == "me/model"
    assert hub.repos["me/model"].private
    assert f'revision = "me/model", "{pushed.revision}"' in hub.files("me/model")["README.md"].decode()
    assert {path: content for path, content in hub.files("me/model", pushed.revision).items() if path[0] != "."} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }

    save_file(inputs_for(MASKED_LM), tmp_path / "inputs")
    arguments = ("me/model", pushed.revision, tmp_path / "inputs", tmp_path / "outputs")
    # a private repository is not there for those who may not see it
    refused = client(LOAD, *arguments, cwd=tmp_path, hub=hub)
    assert refused.returncode != 0
    assert "private" in refused.stderr and "token" in refused.stderr
    done = client(LOAD, *arguments, cwd=tmp_path, hub=hub, token=TOKEN)
    assert done.returncode == 0, done.stderr
    expected = expected_logits(folder)
    assert torch.equal(load_file(tmp_path / "outputs")["logits"], expected)

    (tmp_path / "outputs").unlink()
    before = len(hub.requests)
    done = client(LOAD, *arguments, cwd=tmp_path, hub=hub, offline=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(tmp_path / "outputs")["logits"], expected)
    assert len(hub.requests) == before


PUSH_TO_HUB = """
import sys
sys.path.insert(0, sys.argv[1])
import hf_linattn
from transformers import AutoModelForMaskedLM, AutoTokenizer
model = AutoModelForMaskedLM.from_pretrained(sys.argv[2])
model.push_to_hub("me/usual", private=True, max_shard_size="60KB")
AutoTokenizer.from_pretrained(sys.argv[2]).push_to_hub("me/usual")
model.push_to_hub("me/usual", revision="other")
"""


CONVERT = """
import sys
from hf_linattn import LinformerConfig, convert_checkpoint
try:
    convert_checkpoint("me/softmax", sys.argv[1], LinformerConfig(projection_length=8, window_size=4))
except ValueError as error:
    print("refused", error)
"""


def test_names_in_the_files_of_a_hub_id_stay_inside_its_folder(hub: Hub, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "base")
    tiny_model("bert", MASKED_LM).save_pretrained(tmp_path / "base")
    hub.repos["me/softmax"] = Repo(private=False)

    def commit(**changed: str) -> None:
        files = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
        files |= {name: content.encode() for name, content in changed.items()}
        hub.contents |= {f"{name} {len(content)}": content for name, content in files.items()}
        hub.repos["me/softmax"].commit("main", {name: f"{name} {len(content)}" for name, content in files.items()})

    for changed, told in (
        ({"modules.json": '[{"path": "../../x"}]'}, "modules.json': path='../../x' leads out of the folder"),
        ({"adapter_config.json": '{"base_model_name_or_path": "/etc"}'}, "base_model_name_or_path='/etc' leads out"),
    ):
        commit(**changed)
        done = client(CONVERT, tmp_path / "out", cwd=tmp_path, hub=hub)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("refused") and told in done.stdout
        assert not (tmp_path / "out").exists()
    commit()
    done = client(CONVERT, tmp_path / "out", cwd=tmp_path, hub=hub)
    assert done.returncode == 0 and done.stdout == "", done.stderr + done.stdout
    assert (tmp_path / "out" / "config.json").is_file()


def test_push_to_hub_of_the_model_works_as_usual(hub: Hub, folder: Path, tmp_path: Path) -> None:
    place = Path(hf_linattn.__file__).parents[1]
    done = client(PUSH_TO_HUB, place, folder, cwd=tmp_path, hub=hub, token=TOKEN)
    assert done.returncode == 0, done.stderr
    assert set(hub.repos["me/usual"].branches) == {"main", "other"}
    files = hub.files("me/usual")
    assert sum(path.endswith(".safetensors") for path in files) > 1
    assert {"modeling_linattn.py", "configuration_linattn.py", "tokenizer.json", "README.md"} <= set(files)

    save_file(inputs_for(MASKED_LM), tmp_path / "inputs")
    arguments = ("me/usual", "main", tmp_path / "inputs", tmp_path / "outputs")
    done = client(LOAD, *arguments, cwd=tmp_path, hub=hub, token=TOKEN)
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(tmp_path / "outputs")["logits"], expected_logits(folder))


def shards(folder: Path) -> list[Path]:
    """The folder's weights, written again in several files."""
    model = AutoModelForMaskedLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize(("method", "part"), [("PUT", "/lfs/"), ("POST", "/commit/"), ("POST", "/preupload/")])
def test_an_upload_that_failed_is_repeated_and_nothing_is_sent_twice(
    hub: Hub, unchecked: None, folder: Path, method: str, part: str
) -> None:
    files = shards(folder)
    assert len(files) > 2
    # a status that the client does not itself try again
    hub.faults.append(Fault(method, part, 507))
    with pytest.raises(ConnectionError, match=r"upload to me/model stopped.*Push again"):
        push(folder, PushConfig(repo="me/model", **LOCAL))
    # all or nothing: no half of a model can be loaded meanwhile
    assert set(hub.files("me/model")) == {".gitattributes"}
    pushed = push(folder, PushConfig(repo="me/model", **LOCAL))
    sent = [path for method, path in hub.requests if method == "PUT"]
    assert len(sent) == len(files) + (part == "/lfs/")
    assert {file.name for file in files} <= set(hub.files("me/model", pushed.revision))
    assert "README.md" in hub.files("me/model")


def test_a_card_that_was_not_written_comes_with_the_next_push(
    hub: Hub, unchecked: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = hf_linattn.publish.upload._upload

    def fail(*arguments: object, **options: object) -> object:
        # the model comes with options, the card without
        return upload(*arguments, **options) if options else 1 / 0

    monkeypatch.setattr(hf_linattn.publish.upload, "_upload", fail)
    with pytest.raises(ZeroDivisionError):
        push(folder, PushConfig(repo="me/model", **LOCAL))
    assert "config.json" in hub.files("me/model") and "README.md" not in hub.files("me/model")
    first = hub.repos["me/model"].branches["main"]
    monkeypatch.setattr(hf_linattn.publish.upload, "_upload", upload)
    # nothing of the model has changed: no new commit of it
    assert push(folder, PushConfig(repo="me/model", **LOCAL)).revision == first
    assert first in hub.files("me/model")["README.md"].decode()


def test_a_second_push_replaces_what_is_of_no_use_any_more(hub: Hub, unchecked: None, folder: Path) -> None:
    whole = Path(shutil.copytree(folder, folder.parent / "whole"))
    shards(folder)
    first = push(folder, PushConfig(repo="me/model", **LOCAL))
    second = push(whole, PushConfig(repo="me/model", **LOCAL))
    assert [path for path in hub.files("me/model") if "safetensors" in path] == ["model.safetensors"]
    # and a revision that a card once named stays what it was
    assert len([path for path in hub.files("me/model", first.revision) if "safetensors" in path]) > 2
    assert first.revision != second.revision


def test_a_branch_is_made_and_main_stays(hub: Hub, unchecked: None, folder: Path) -> None:
    pushed = push(folder, PushConfig(repo="me/model", revision="linear", **LOCAL))
    assert set(hub.files("me/model")) == {".gitattributes"}
    assert "config.json" in hub.files("me/model", "linear")
    assert hub.repos["me/model"].branches["main"] != pushed.revision


def test_a_name_that_holds_something_else_is_refused(hub: Hub, unchecked: None, folder: Path) -> None:
    push(folder, PushConfig(repo="me/model", **LOCAL))
    repo = hub.repos["me/model"]
    hub.contents["softmax"] = b'{"model_type": "bert"}'
    repo.commit("main", {"config.json": "softmax"})
    before = dict(repo.branches)
    with pytest.raises(FileExistsError, match=r"me/model exists.*model_type='bert'.*another name"):
        push(folder, PushConfig(repo="me/model", **LOCAL))
    repo.commit("main", {"weights.bin": "softmax"})
    with pytest.raises(FileExistsError, match=r"me/model exists and holds something else"):
        push(folder, PushConfig(repo="me/model", **LOCAL))
    assert before["main"] in repo.commits and len(repo.commits) == 5


@pytest.mark.parametrize("private", [True, False])
def test_a_push_does_not_change_who_sees_a_repository(hub: Hub, unchecked: None, folder: Path, private: bool) -> None:
    push(folder, PushConfig(repo="me/model", private=private, **LOCAL))
    with pytest.raises(FileExistsError, match=f"private={not private}: me/model exists"):
        push(folder, PushConfig(repo="me/model", private=not private, **LOCAL))
    push(folder, PushConfig(repo="me/model", **LOCAL))
    assert hub.repos["me/model"].private is private


def test_who_may_not_write_is_told(hub: Hub, unchecked: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PermissionError, match="does not allow it"):
        push(folder, PushConfig(repo="somebody/model", **LOCAL))
    with pytest.raises(PermissionError, match="does not allow it"):
        push(folder, PushConfig(repo="model", **LOCAL), token="hf_wrong")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PermissionError, match="hf auth login"):
        push(folder, PushConfig(repo="model", **LOCAL))
    assert hub.repos == {}


def test_a_card_that_the_hub_refuses_is_known_before_anything_is_sent(hub: Hub, unchecked: None, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"license.* must be one of"):
        push(folder, PushConfig(repo="model", base_model="local", license="my own"))
    assert hub.repos == {}


def test_a_hub_that_is_not_there_is_named(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9 cannot be reached"):
        push(folder, PushConfig(repo="me/model", **LOCAL))


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def cut_shard(folder: Path) -> None:
    last = shards(folder)[-1]
    last.write_bytes(last.read_bytes()[:-100])


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def newer(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())["linattn"]
    change_config(folder, linattn={**settings, "format_version": 99})


DAMAGE: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no folder": (shutil.rmtree, FileNotFoundError, "There is no folder"),
    "no config": (lambda f: (f / "config.json").unlink(), FileNotFoundError, r"no config\.json"),
    "adapter": (
        lambda f: (f / "config.json").rename(f / "adapter_config.json"),
        FileNotFoundError,
        "PEFT adapter.*merge_and_unload",
    ),
    "half a config": (lambda f: (f / "config.json").write_text('{"model'), ValueError, r"config\.json' is damaged"),
    "softmax": (lambda f: change_config(f, model_type="bert"), ValueError, "'bert', which is no converted model"),
    "unknown family": (lambda f: change_config(f, model_type="linattn_new"), ValueError, "linattn_new.*Upgrade"),
    "newer": (newer, ValueError, r"config\.json': linattn\.format_version=99 is newer.*pip install -U"),
    "no settings": (lambda f: change_config(f, linattn=None), ValueError, r"config\.json': method=None"),
    "no auto_map": (lambda f: change_config(f, auto_map=None), ValueError, "no auto_map"),
    "foreign code": (
        lambda f: change_config(f, auto_map={"AutoConfig": "a/b--configuration_linattn.X"}),
        ValueError,
        "another repository, 'a/b--",
    ),
    "no modelling file": (
        lambda f: (f / "feature_sums.py").unlink(),
        FileNotFoundError,
        r"feature_sums\.py' is missing.*py needs",
    ),
    "no configuration file": (
        lambda f: (f / "configuration_linattn.py").unlink(),
        FileNotFoundError,
        r"configuration_linattn\.py' is missing",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, r"model\.safetensors' is missing"),
    "cut off": (cut_weights, ValueError, r"model\.safetensors' is cut off or damaged"),
    "cut off shard": (cut_shard, ValueError, r"model-0000\d-of-0000\d\.safetensors' is cut off"),
    "no shard": (lambda f: shards(f)[1].unlink(), FileNotFoundError, r"model-00002-of-.*' is missing"),
    "half an index": (
        lambda f: (shards(f), (f / "model.safetensors.index.json").write_text("{")),
        ValueError,
        r"index\.json' is damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_that_is_not_whole_is_named_before_anything_is_sent(hub: Hub, folder: Path, damage: str) -> None:
    do, error, told = DAMAGE[damage]
    do(folder)
    with pytest.raises(error, match=told):
        push(folder, PushConfig(repo="me/model", **LOCAL))
    assert hub.requests == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors: tensors.pop("bert.embeddings.LayerNorm.weight"), r"missing_keys: .*LayerNorm\.weight"),
        (lambda tensors: tensors["bert.embeddings.LayerNorm.weight"].fill_(float("nan")), "not finite"),
        (lambda tensors: tensors["bert.embeddings.LayerNorm.bias"].fill_(float("inf")), "not finite"),
    ],
    ids=["lost", "nan", "inf"],
)
def test_what_does_not_work_in_a_fresh_process_is_not_pushed(
    hub: Hub, folder: Path, change: Callable[[dict[str, torch.Tensor]], None], told: str
) -> None:
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=f"fresh process, and is not pushed: .*{told}"):
        push(folder, PushConfig(repo="me/model", **LOCAL))
    assert hub.repos == {}


@pytest.mark.parametrize(
    ("family", "auto"),
    [
        ("bert", "AutoModelForMultipleChoice"),
        # its body is made by AutoModel from the config
        ("llama", "AutoModelForSequenceClassification"),
    ],
)
def test_heads_of_every_kind_load_afresh(tmp_path: Path, family: str, auto: str) -> None:
    converted_model(
        LinformerConfig(projection="learned", projection_length=8, window_size=4), family, auto
    ).save_pretrained(tmp_path)
    load_afresh(tmp_path)


def test_only_what_belongs_to_a_model_is_pushed(hub: Hub, unchecked: None, folder: Path) -> None:
    (folder / "checkpoint-5").mkdir()
    (folder / "1_Pooling").mkdir()
    strays = ["optimizer.pt", "training_args.bin", "notes.txt", ".env", "train.py", "checkpoint-5/config.json"]
    # names that patterns would take
    strays += ["tokenizer_secret.json", "id_rsa.model", "LICENSE_KEY.txt", "1_Pooling/notes.json"]
    # private, and a repository of its own
    (folder / ".git").mkdir()
    strays += [".git/config", ".env.local", ".netrc", "token"]
    for name in (*strays, "1_Pooling/config.json", "LICENSE"):
        (folder / name).write_text("{}")
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    push(folder, PushConfig(repo="me/model", **LOCAL))
    files = set(hub.files("me/model"))
    assert {"1_Pooling/config.json", "modules.json", "LICENSE", "generation_config.json"} <= files
    assert not files & set(strays)


def test_modules_of_another_head_stay(hub: Hub, unchecked: None, folder: Path) -> None:
    """A masked language model that was a sentence encoder's is no sentence encoder; what was pushed before goes."""
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    sentence = ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json")
    push(folder, PushConfig(repo="me/model", **LOCAL))
    assert hub.files("me/model").keys() >= set(sentence)
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "SentenceTransformer"}')
    card = push(folder, PushConfig(repo="me/model", **LOCAL)).card
    assert not hub.files("me/model").keys() & set(sentence)
    assert "pipeline_tag: fill-mask" in card and "sentence" not in card


def test_no_path_of_this_machine_is_pushed(hub: Hub, unchecked: None, folder: Path) -> None:
    """Whatever wrote them: Trainer, an older Transformers, or a run of an earlier version."""
    secret = "/home/somebody/secret"
    training = {"stages": [], "data": {"dataset": f"{secret}/pages.jsonl"}, "earlier": {"model": f"{secret}/base"}}
    change_config(folder, _name_or_path=f"{secret}/run 1", linattn_training=training, id2label={"0": "/m/09x"})
    tokenizer = folder / "tokenizer_config.json"
    values = {**json.loads(tokenizer.read_text()), "tokenizer_file": r"C:\\Users\\somebody\\tokenizer.json"}
    tokenizer.write_text(json.dumps(values))
    pushed = push(folder, PushConfig(repo="me/model", **LOCAL))
    files = hub.files("me/model")
    assert not [name for name, content in files.items() if b"somebody" in content]
    assert json.loads(files["config.json"])["linattn_training"]["data"]["dataset"] == "pages.jsonl"
    assert json.loads(files["config.json"])["id2label"] == {"0": "/m/09x"}
    assert json.loads(files["tokenizer_config.json"])["tokenizer_file"] == "tokenizer.json"
    assert "data, dataset: pages.jsonl" in pushed.card
    # a card of one's own is not changed
    (folder / "README.md").write_text(f"---\nlicense: mit\n---\nMade in {folder.resolve()}.\n")
    with pytest.raises(ValueError, match=r"README\.md', line 4 has a path of this machine"):
        push(folder, PushConfig(repo="me/model"))


def test_a_dry_run_writes_the_card_and_sends_nothing(
    hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / ".env").write_text("secret")
    call = ["push", str(folder), "--repo", "model", "--base-model", "local", "--license", "mit", "--dry-run"]
    assert main(call) == 0
    out = capsys.readouterr().out
    assert "would go to" in out and "  model.safetensors\n" in out and ".env" not in out and "Nothing was sent" in out
    assert hub.repos == {} and not hub.seen("POST", "/repos/create") and not hub.seen("PUT", "")
    card = (folder / "card.md").read_text()
    assert 'name, revision = "me/model", "main"' in card
    # it is not taken for a card of one's own, and does not go along
    assert main(call[:-1]) == 0
    assert "card.md" not in hub.files("me/model") and "README.md" in hub.files("me/model")


def test_a_dry_run_needs_no_token(
    hub: Hub, unchecked: None, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    call = ["push", str(folder), "--base-model", "local", "--license", "mit", "--dry-run", "--repo"]
    assert main([*call, "me/model"]) == 0
    assert 'name, revision = "me/model", "main"' in (folder / "card.md").read_text()
    # the owner of a short name is that of the token
    assert main([*call, "model"]) == 1
    assert "There is no token of the Hub" in capsys.readouterr().err


def put_base(hub: Hub, card: str) -> None:
    """A repository with a card and nothing else."""
    hub.contents["card"] = card.encode()
    hub.repos["me/base"] = Repo(private=False)
    hub.repos["me/base"].commit("main", {"README.md": "card"})


def test_the_licence_is_the_bases_and_never_guessed(hub: Hub, unchecked: None, folder: Path) -> None:
    put_base(hub, "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\nlanguage: de\n---\n")
    card = push(folder, PushConfig(repo="me/model", base_model="me/base")).card
    for line in ("license: other", "license_name: mine", "language: de", "base_model: me/base"):
        assert line in card.splitlines()
    assert "base_model_relation: finetune" in card

    card = push(folder, PushConfig(repo="me/model", base_model="me/base", license="mit")).card
    assert "license: mit" in card and "license_name" not in card

    put_base(hub, "---\nlanguage: de\n---\n")
    with pytest.raises(ValueError, match=r"license: me/base names none.*--license"):
        push(folder, PushConfig(repo="me/model", base_model="me/base"))
    with pytest.raises(ValueError, match=r"base_model='me/none' is not on the Hub"):
        push(folder, PushConfig(repo="me/model", base_model="me/none", license="mit"))
    with pytest.raises(ValueError, match=r"base_model: .*--base-model"):
        push(folder, PushConfig(repo="me/model", license="mit"))


def test_what_the_conversion_recorded_of_the_base_is_used(hub: Hub, unchecked: None, folder: Path) -> None:
    put_base(hub, "---\nlicense: apache-2.0\n---\n")
    change_config(folder, linattn_base={"name": "me/base"})
    card = push(folder, PushConfig(repo="me/model")).card
    assert "base_model: me/base" in card and "license: apache-2.0" in card
    change_config(folder, linattn_base={"license": "bsd-3-clause"})
    assert "license: bsd-3-clause" in push(folder, PushConfig(repo="me/model", base_model="local")).card


def test_a_conversion_records_what_it_came_from(tmp_path: Path) -> None:
    base = tiny_model()
    assert not hasattr(convert(base, CONFIG).config, "linattn_base")
    base.config.name_or_path, base.config._commit_hash = "org/base", "a" * 40
    assert convert(base, CONFIG).config.linattn_base == {"name": "org/base", "revision": "a" * 40}
    # of a folder, not the path, which is of use on this machine only
    base.save_pretrained(tmp_path)
    assert not hasattr(convert(tmp_path, CONFIG).config, "linattn_base")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert convert(tmp_path, CONFIG).config.linattn_base == {"license": "mit"}
    for text in ("---\nlicense: [\n---\n", "---\nlicense: [a, b]\n---\n", "words"):
        (tmp_path / "README.md").write_text(text)
        assert not hasattr(convert(tmp_path, CONFIG).config, "linattn_base")


def test_a_card_of_ones_own_is_pushed_as_it_is(hub: Hub, unchecked: None, folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: mit\n---\nMy words.\n")
    assert push(folder, PushConfig(repo="me/model")).card == (folder / "README.md").read_text()
    assert hub.files("me/model")["README.md"] == (folder / "README.md").read_bytes()
    with pytest.raises(ValueError, match=r"report='x'.*README\.md of its own"):
        push(folder, PushConfig(repo="me/model", report="x"))


def test_the_command(hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["push", str(folder), "--repo", "model", "--base-model", "local", "--license", "mit", "--private"]
    assert main(call) == 0
    revision = hub.repos["me/model"].branches["main"]
    assert f"{folder} -> {hub.url}/me/model (revision " in capsys.readouterr().out
    assert hub.repos["me/model"].private and revision

    cut_weights(folder)
    assert main(call) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hf-linattn: ") and "model.safetensors' is cut off" in error
    assert hub.repos["me/model"].branches["main"] == revision


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="repo=''"):
        PushConfig(repo="")


def test_a_link_out_of_the_folder_is_refused_before_anything_is_sent(
    hub: Hub, unchecked: None, folder: Path, tmp_path: Path
) -> None:
    private = tmp_path / "private.txt"
    private.write_text("secret")
    (folder / "merges.txt").unlink(missing_ok=True)
    (folder / "merges.txt").symlink_to(private)
    with pytest.raises(ValueError, match=r"'merges.txt' is a link that leads out of the folder"):
        push(folder, PushConfig(repo="me/model", **LOCAL))
    assert "me/model" not in hub.repos


def test_a_shard_outside_the_folder_is_refused(hub: Hub, unchecked: None, folder: Path) -> None:
    index = {"weight_map": {"x": "../private.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"weight_map\['x'\]='../private.safetensors' leads out of the folder"):
        push(folder, PushConfig(repo="me/model", **LOCAL))
