"""Which version of these files a checkpoint was written with, and whether another one runs it."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# files of the folder that do not travel
_OWN = ("__init__.py", "naive.py")


@cache
def code_version() -> str:
    """The package's version, and a digest of the files that travel with a checkpoint."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in _OWN:
            digest.update(path.name.encode() + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def check_code(config: Any) -> None:
    """Warn, once, where the installed package runs a checkpoint that other code was written with."""
    written = getattr(config, "linattn_code", None)
    # the files of the checkpoint itself, which run where the package is not imported, need no check
    if __package__ != "hf_linattn.modeling" or written in (None, code_version()):
        return
    # here: the package reads the version in this file, and its import takes neither Transformers nor torch
    from transformers.utils import logging

    version = str(written).partition("+")[0]
    logging.get_logger(__name__).warning_once(
        f"The checkpoint's code has the version {written!r}, and the installed hf-linattn, which runs it, "
        f"{code_version()!r}: outputs may differ. To run the same code, install hf-linattn=={version}; or load the "
        "checkpoint with trust_remote_code=True, and without importing hf_linattn."
    )
