"""Every script starts from a clean clone, and none hides a library."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
SCRIPTS = Path(__file__).parents[2] / "scripts"
FILES = sorted(SCRIPTS.rglob("*.py"))
#: Imported by others, and run by nobody.
MODULES = ("common", "measure", "rows", "subjects", "decoding", "tables", "against")


#: Runs scripts of one folder with --help, as Python runs a script: its folder is the first place to import from.
HELP = """
import contextlib, io, json, runpy, sys
folder, *paths = sys.argv[1:]
sys.path[0] = folder
helps = {}
for path in paths:
    sys.argv = [path, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            assert not end.code, path
    helps[path] = text.getvalue()
print(json.dumps(helps))
"""


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda folder: folder.name)
def test_help(folder: Path, tmp_path: Path) -> None:
    """In one process for each folder: most of the time is for the imports that the scripts share."""
    paths = [str(path) for path in FILES if path.parent == folder and path.stem not in MODULES]
    command = [sys.executable, "-c", HELP, str(folder), *paths]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    helps = json.loads(done.stdout)
    assert paths and list(helps) == paths
    assert [path for path, text in helps.items() if not text.startswith("usage: ")] == []


def test_no_name_is_that_of_a_library() -> None:
    """The folder of a script is the first place where Python looks for what the script imports."""
    names = {path.stem for path in SCRIPTS.rglob("*") if path.is_dir() or path.suffix == ".py"} - {"__pycache__"}
    assert {"quickstart", "benchmark", "common"} <= names
    assert {name for name in names if importlib.util.find_spec(name) is not None} == set()


def test_nothing_changes_where_python_looks() -> None:
    assert [path.name for path in FILES if "sys.path" in path.read_text()] == []


def test_the_readme_names_every_script() -> None:
    text = (SCRIPTS / "README.md").read_text()
    assert [path.name for path in FILES if f"`{path.relative_to(SCRIPTS)}`" not in text] == []
