"""Adapt a converted checkpoint, on one process or many: the command `hf-linattn adapt` as a script.

accelerate launch scripts/finetune.py CONVERTED --output DIR --dataset DOCUMENTS
accelerate launch --config_file scripts/accelerate_configs/fsdp2.yaml scripts/finetune.py CONVERTED ...
"""

import sys

from hf_linattn.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["adapt", *sys.argv[1:]]))
