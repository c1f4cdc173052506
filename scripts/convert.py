"""Convert a checkpoint: `python scripts/convert.py ID_OR_FOLDER --method performer --output DIR`.

The same as `hf-linattn convert`, with the same options: `--help` lists them.
"""

import sys

from hf_linattn.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
