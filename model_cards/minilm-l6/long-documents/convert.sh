#!/usr/bin/env bash
# The conversions that the report compares: MODEL is the folder of all-MiniLM-L6-v2.
set -euo pipefail
model=$1
# as it was measured: the first token does not see all, and no row is exact
window=(--window-size 64 --global-tokens 1 --no-global-queries --exact-length 0)
convert() { hf-linattn convert "$model" --max-length 4096 --output "converted/$1" "${@:2}"; }
convert linformer --method linformer --projection learned --projection-length 128
convert performer --method performer --num-features 128 --feature-map learned
convert joined-linformer --method linformer --projection learned --projection-length 64 "${window[@]}"
convert joined-performer --method performer --num-features 128 --feature-map learned "${window[@]}"
# texts.jsonl: pieces of novels, essays and software documentation, 1,491 rows
hf-linattn adapt converted/joined-linformer --dataset texts.jsonl --output adapted/joined-linformer \
    --transfer-steps 0 --distil-steps 250 --mixed-precision bf16 --learning-rate 4e-5 --query-key-lr 1e-4 \
    --projection-lr 3e-3
