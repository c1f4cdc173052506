#!/usr/bin/env bash
# All set-up, then format, lint, types, documentation and tests.
#   bash scripts/test.sh            newest Transformers in full, and the core tests with the lowest supported
#   bash scripts/test.sh --lowest   the same tests, all with the lowest supported Transformers
#   bash scripts/test.sh --slow     tests marked slow, which the above leave out, with the newest Transformers
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1
case "${1:-}" in
"")
    bash scripts/setup.sh
    .venv/bin/ruff format --check .
    .venv/bin/ruff check .
    .venv/bin/mypy
    bash scripts/docs.sh
    bash scripts/setup.sh .venv-lowest constraints-lowest.txt
    .venv-lowest/bin/python -m pytest -q -n logical --maxprocesses 8 -m "core and not slow"
    .venv/bin/python -m pytest -q -n logical --maxprocesses 8 -m "not slow"
    ;;
--lowest)
    bash scripts/setup.sh .venv-lowest constraints-lowest.txt
    .venv-lowest/bin/python -m pytest -q -n logical --maxprocesses 8 -m "not slow"
    ;;
--slow)
    bash scripts/setup.sh
    .venv/bin/python -m pytest -q -m slow
    ;;
*)
    echo "test.sh: unknown option $1; allowed are --lowest and --slow" >&2
    exit 2
    ;;
esac
