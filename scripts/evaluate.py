"""Compare a checkpoint with its conversions: `python scripts/evaluate.py ID_OR_FOLDER --task probe --output DIR`.

The same as `hf-linattn evaluate`, with the same options (`--help` lists them), also under `accelerate launch`.
"""

import sys

# the folder of this file: its name would hide the library `evaluate`, which the package uses
sys.path.pop(0)

from hf_linattn.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
