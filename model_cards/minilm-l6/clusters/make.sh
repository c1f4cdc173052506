#!/usr/bin/env bash
# The report beside this file: bash make.sh MODEL DATA, with the folder of all-MiniLM-L6-v2 and that of the documents.
set -euo pipefail
model=$1 data=$2
window=(--window-size 64 --global-tokens 1 --projection-length 128)
hf-linattn convert "$model" --method linformer --max-length 4096 --exact-length 0 "${window[@]}" --output converted/joined
hf-linattn convert "$model" --method linformer --max-length 4096 --exact-length 0 --projection-length 256 --output converted/pure
hf-linattn adapt converted/joined --base "$model" --dataset topics --distil-steps 60 --sequence-length 2048 \
    --batch-size 1 --eval-sequences 4 --eval-steps 30 --output converted/adapted
evaluate() {
    hf-linattn evaluate "$model" --no-branches --truncate --output report "$@" --converted \
        "256 clusters=converted/pure" "window 64 + first token + 128 clusters=converted/joined" \
        "the same, adapted=converted/adapted"
}
passages=("$data/authorship_passages.jsonl.gz" --id-column id --label-column author --group-column novel)
passages+=(--max-classes 10 --max-per-class 10)
evaluate --task probe --name "authorship, 10 authors" --folds 2 --no-footprint --lengths 512 4096 --dataset "${passages[@]}"
evaluate --task embeddings --no-footprint --lengths 512 4096 --dataset "${passages[@]}"
evaluate --task pairs --name "novel pairs" --no-footprint --lengths 512 4096 --dataset "$data/novel_pairs.jsonl.gz" \
    --split-column split --split test --label-column label --pair-texts "$data/authorship_passages.jsonl.gz" \
    --max-pair-texts 60
