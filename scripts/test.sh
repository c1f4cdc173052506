#!/usr/bin/env bash
# All set-up, then format, lint, types and tests.
#   bash scripts/test.sh            newest Transformers in full, and the core tests with the lowest supported
#   bash scripts/test.sh --lowest   all tests with the lowest supported Transformers
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1
case "${1:-}" in
"")
    bash scripts/setup.sh
    .venv/bin/ruff format --check .
    .venv/bin/ruff check .
    .venv/bin/mypy
    bash scripts/setup.sh .venv-lowest constraints-lowest.txt
    .venv-lowest/bin/python -m pytest -q -n logical --maxprocesses 8 -m core
    .venv/bin/python -m pytest -q -n logical --maxprocesses 8
    ;;
--lowest)
    bash scripts/setup.sh .venv-lowest constraints-lowest.txt
    .venv-lowest/bin/python -m pytest -q -n logical --maxprocesses 8
    ;;
*)
    echo "test.sh: unknown option $1; allowed is --lowest" >&2
    exit 2
    ;;
esac
