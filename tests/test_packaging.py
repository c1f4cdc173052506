"""What is built for PyPI: no link of the README leads nowhere, nothing is missing, and the wheel works by itself."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import hf_linattn

from .helpers import run_python, save_tokenizer, tiny_model

ROOT = Path(__file__).parents[1]

for _tool in ("build", "hatchling", "hatch_fancy_pypi_readme", "twine"):
    pytest.importorskip(_tool)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that was made of it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return folder


def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


def test_twine_finds_nothing(built: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_page_of_pypi_has_no_link_that_leads_nowhere(built: Path) -> None:
    with zipfile.ZipFile(wheel(built)) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    text, readme = str(metadata.get_payload()), (ROOT / "README.md").read_text()
    links, of_readme = (re.findall(r"\]\(([^)\s]+)\)", page) for page in (text, readme))
    assert links == [link for link in of_readme if link.startswith(("https://", "#"))] != of_readme
    # of a link to a file, text and path stay
    assert "how to convert (`docs/how-to/convert.md`)." in text
    assert metadata["Version"] == hf_linattn.__version__


def test_the_source_distribution_is_whole(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "constraints.txt",
        "constraints-lowest.txt",
    }
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "hf_linattn").rglob("*.py")}
    assert not expected - names


def test_versions_agree() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == hf_linattn.__version__
    assert f"version = {{{hf_linattn.__version__}}}" in (ROOT / "README.md").read_text()
    assert f"## [{hf_linattn.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


USE = """
import sys
from pathlib import Path
import hf_linattn
from hf_linattn import LinformerConfig, convert_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer
assert Path(hf_linattn.__file__).is_relative_to(sys.prefix), hf_linattn.__file__
config = LinformerConfig(window_size=4, global_tokens=1, projection_length=8)
convert_checkpoint(sys.argv[1], "converted", config, max_length=128)
model, tokenizer = AutoModelForCausalLM.from_pretrained("converted"), AutoTokenizer.from_pretrained("converted")
inputs = tokenizer("w7 w8 w9", return_tensors="pt")
ids = model.generate(input_ids=inputs.input_ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
assert ids.shape[1] == inputs.input_ids.shape[1] + 5
print("generated", type(model).__name__)
"""


@pytest.mark.slow
def test_a_wheel_in_a_fresh_environment_converts_loads_and_generates(built: Path, tmp_path: Path) -> None:
    """What it needs comes from this environment; the package itself from the wheel alone."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--no-deps", "--no-index", "-q", wheel(built)], check=True)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    # a path alone: files that edit the path, such as that of an editable install, are not read in it
    (site / "needs.pth").write_text(sysconfig.get_path("purelib"))
    save_tokenizer(tmp_path / "base")
    tiny_model("gpt2", "AutoModelForCausalLM").save_pretrained(tmp_path / "base")
    done = run_python(USE, tmp_path / "base", cwd=tmp_path, python=python)
    assert done.returncode == 0 and "generated LinAttnGPT2LMHeadModel" in done.stdout, done.stderr
    command = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True)
    assert "hf-linattn" not in command.stdout, command.stdout
    help_text = subprocess.run([python.with_name("hf-linattn"), "convert", "--help"], capture_output=True, text=True)
    assert help_text.returncode == 0 and "--method" in help_text.stdout
