"""Every script starts from a clean clone, and none hides a library."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
SCRIPTS = Path(__file__).parents[2] / "scripts"
FILES = sorted(SCRIPTS.rglob("*.py"))
#: Imported by others, and run by nobody.
MODULES = ("common", "measure", "rows", "subjects", "decoding", "tables", "against")


@pytest.mark.parametrize("path", [path for path in FILES if path.stem not in MODULES], ids=lambda path: path.stem)
def test_help(path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(path), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


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
