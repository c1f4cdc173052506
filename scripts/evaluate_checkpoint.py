"""Compare a checkpoint with its conversions: `python scripts/evaluate_checkpoint.py ID_OR_FOLDER --task probe ...`.

The same as `hf-linattn evaluate`, with the same options (`--help` lists them), also under `accelerate launch`.
"""

import sys

from hf_linattn.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
