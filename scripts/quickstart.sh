#!/usr/bin/env bash
# All set-up, then the main job on a model and documents that install by name: see scripts/quickstart.py.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
HF_HUB_OFFLINE=1 .venv/bin/python scripts/quickstart.py "$@"
