"""A command that is killed at any moment leaves nothing that is half written, and the same command then ends."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..adapt.runs import PROJECTED, converted_folder, write_documents
from ..publish.hub_server import TOKEN, Hub, serve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A softmax checkpoint, its conversion, and documents."""
    root = tmp_path_factory.mktemp("killed")
    converted_folder(root, PROJECTED)
    write_documents(root / "documents.jsonl")
    return root


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as running:
        yield running


def start(cwd: Path, *arguments: Path | str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hf_linattn", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # with the processes that it starts
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    told = process.stderr.read()
    assert process.wait(timeout=300) == 0, told[-2000:]


def killed_at_random(
    cwd: Path, *arguments: Path | str, times: int = 4, seed: int = 0, **environment: str
) -> Iterator[None]:
    """Run the command once to see how long it takes, then kill it at random moments; after each, the caller looks."""
    begun = time.monotonic()
    end(start(cwd, *arguments, **environment))
    whole, chance = time.monotonic() - begun, random.Random(seed)
    yield
    for _ in range(times):
        process = start(cwd, *arguments, **environment)
        # the imports, which write nothing, take the first part
        time.sleep(whole * chance.uniform(0.4, 1.0))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        yield


def check_reports(folder: Path) -> None:
    """What can be seen is whole."""
    for path in folder.glob("[!.]*.json"):
        json.loads(path.read_text())
    for path in folder.glob("[!.]*.png"):
        assert path.read_bytes().endswith(b"IEND\xaeB`\x82"), path
    if (folder / "report.html").exists():
        assert (folder / "report.html").read_text().endswith("</html>\n")


def clear(folder: Path) -> None:
    """So that there is something to do again."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("command", "options", "results"),
    [
        ("analyze", ["--length", "32", "--documents", "2"], ["analysis.json"]),
        (
            "evaluate",
            ["--task", "embeddings", "--lengths", "16", "24", "--truncate", "--no-footprint"],
            ["report.json"],
        ),
    ],
)
def test_a_report_is_whole_or_not_there(
    command: str, options: list[str], results: list[str], place: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    call = [command, place / "base", "--dataset", place / "documents.jsonl", "--output", output, *options]
    if command == "evaluate":
        call += ["--converted", f"swap={place / 'converted'}"]
    for _ in killed_at_random(tmp_path, *call):
        check_reports(output)
        clear(output)
    # and once in a folder with what a killed start left
    process = start(tmp_path, *call)
    time.sleep(6)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    end(start(tmp_path, *call))
    check_reports(output)
    assert {"report.md", "report.html", *results} <= {path.name for path in output.iterdir()}


def test_a_push_leaves_a_whole_model_or_none(hub: Hub, place: Path, tmp_path: Path) -> None:
    call = ["push", place / "converted", "--repo", "me/model", "--base-model", "local", "--license", "mit"]
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
        "NO_PROXY": "127.0.0.1,localhost",
    }
    before = {path: path.read_bytes() for path in (place / "converted").rglob("*") if path.is_file()}
    for _ in killed_at_random(tmp_path, *call, **environment):
        for repo in hub.repos.values():
            for commit in repo.commits.values():
                names = {name for name in commit if name not in (".gitattributes", "README.md")}
                assert not names or {"config.json", "model.safetensors", "modeling_linattn.py"} <= names
        hub.repos.clear()
        hub.contents.clear()
    end(start(tmp_path, *call, **environment))
    assert "README.md" in hub.files("me/model") and "model.safetensors" in hub.files("me/model")
    # nothing is written into the folder
    assert {path: path.read_bytes() for path in (place / "converted").rglob("*") if path.is_file()} == before
