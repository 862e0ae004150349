#!/usr/bin/env bash
# Ablations of LLaMA-2-7B and further patterns, each by launch/llama2_7b.sh with one thing changed:
#
#     launch/llama2_ablations.sh magnitude                     # 20,000 steps; further flags go to launch/train.py
#     STEPS=10000 launch/llama2_ablations.sh full              # half of the steps
#
# Paper (arXiv 2605.06402, its ablation on C4; mean of seven zero-shot tasks): full 57.23, perplexity 6.38; without
# SLoRB 55.04, 6.36; by magnitude 55.61; without distillation 55.72; teacher of 13B 54.87; 10,000 steps 55.89. Its
# block-16 keeps half of every 16 x 16 tile; GPT-2 medium 39.45, large 41.87: below 2:4, of which it is a superset.
# The 13B teacher takes another 26 GB in bf16 over the GPUs. Planned for, memory and data: launch/llama2_7b.sh.
set -euo pipefail

name="$(basename "$0" .sh)"
[[ "${HOSTFILE:-/}" == /* ]] || export HOSTFILE="$PWD/$HOSTFILE" # of where this was called, as for the recipe
cd "$(dirname "$0")/.."
flags=()
case "${1:-}" in
    full) block='{"start": null, "low_rank": {"k": 16}}' ;;
    no_slorb) block='{"start": null, "low_rank": null}' ;;
    magnitude) block='{"start": null, "low_rank": {"k": 16}, "importance": "magnitude"}' ;;
    no_distillation) block='{"start": null, "low_rank": {"k": 16}, "distillation": null}' ;;
    teacher_13b) block='{"start": null, "low_rank": {"k": 16}}' flags=(--teacher meta-llama/Llama-2-13b-hf) ;;
    paper_like) block='{"start": null, "preset": "paper_like"}' ;;
    block16) block='{"start": null, "pattern": "block16"}' ;;
    *) echo "usage: launch/$name.sh full|no_slorb|magnitude|no_distillation|teacher_13b|paper_like|block16" \
        "[flags of launch/train.py]" >&2; exit 2 ;;
esac
which=$1
shift
if [ -x .venv/bin/python ]; then export PATH="$PWD/.venv/bin:$PATH"; fi
export OUTPUT="${OUTPUT:-runs/${name}_$which}"
python launch/with_block.py "${CONFIG:-ds_configs/zero3.json}" "$OUTPUT.json" "$block"
CONFIG="$OUTPUT.json" exec launch/llama2_7b.sh 5B ${flags[@]+"${flags[@]}"} "$@"
