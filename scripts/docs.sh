#!/usr/bin/env bash
# Set up and build the documentation as HTML; a warning, such as a link that leads nowhere, is an error.
#   bash scripts/docs.sh [FOLDER]      default: runs/docs
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
output=${1:-runs/docs}
.venv/bin/python -m sphinx --builder html --conf-dir docs --doctree-dir "$output/.doctrees" --fail-on-warning --quiet . "$output"
echo "Written: $output/docs/index.html"
