"""What most adaptations here start from."""

from pathlib import Path

import pytest

from hf_linattn.data.documents import DataConfig

from .runs import converted_folder, write_documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_folder(tmp_path_factory.mktemp("learned"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_documents(tmp_path_factory.mktemp("data") / "documents.jsonl")
