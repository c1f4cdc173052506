"""A checkpoint says which version of the modelling files it was written with; another one that runs it warns, once."""

import json
import logging
from pathlib import Path

import pytest
from transformers import AutoModel

import hf_linattn
from hf_linattn import LinformerConfig
from hf_linattn.modeling.code_version import code_version

from ..helpers import converted_model, run_python

CONFIG = LinformerConfig(projection="mean", projection_length=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    converted_model(CONFIG).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def set_version(folder: Path, version: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "linattn_code": version}))


def test_other_code_is_told_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert code_version().startswith(f"{hf_linattn.__version__}+")
    assert json.loads((folder / "config.json").read_text())["linattn_code"] == code_version()
    monkeypatch.setattr(logging.getLogger("hf_linattn"), "propagate", True)
    AutoModel.from_pretrained(folder)
    assert "code" not in caplog.text
    set_version(folder, "0.0.9+0123456789ab")
    for _ in range(2):
        model = AutoModel.from_pretrained(folder)
    told = [record.getMessage() for record in caplog.records if "code has the version" in record.getMessage()]
    assert len(told) == 1 and "'0.0.9+0123456789ab'" in told[0] and "hf-linattn==0.0.9" in told[0]
    # written again, it has the code that runs here
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["linattn_code"] == code_version()


def test_a_folder_that_runs_its_own_code_says_its_own_version(folder: Path, tmp_path: Path) -> None:
    set_version(folder, "0.0.9+0123456789ab")
    code = f"""
import sys
sys.modules["hf_linattn"] = None
from transformers import AutoModel
AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True).save_pretrained("again")
"""
    done = run_python(code, cwd=tmp_path)
    assert done.returncode == 0 and "code has the version" not in done.stderr, done.stderr
    # the digest of the files that ran, which are those that were written
    assert json.loads((tmp_path / "again" / "config.json").read_text())["linattn_code"] == code_version()
