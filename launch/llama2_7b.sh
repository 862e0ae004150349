#!/usr/bin/env bash
# LLaMA-2-7B to 2:4 on 8 GPUs of 80 GiB: `launch/llama2_7b.sh 5B` or `launch/llama2_7b.sh 1.25B`.
#
# Paper (arXiv 2605.06402, the LLaMA-2 table; WikiText-2 perplexity at 4096 tokens, mean of seven zero-shot tasks with
# RACE): dense 5.12, 56.43; 2:4 after 1.25B tokens 6.24, 55.96, after 5B tokens 6.09, 57.27. Its ablation on C4: 6.38.
# Its perplexities are above those that it lists for plain retraining of a fixed mask (5.78).
#
# 20,000 or 4,768 steps of 64 x 4096 tokens: 5.24B or 1.25B. Batch, context and learning rate (1e-4 to 1e-5 by a
# cosine, 5% warm-up) are the paper's; its code adds 13,000 steps of finetuning to the 20,000, here all is in them.
# Ours: the defaults of ds_configs/zero3.json, not the paper's preset. They measured better on a small model
# (studies/notes.md); at this size nothing has been measured. For settings like the paper's
# write "preset": "paper_like" in a copy of the JSON and give it as CONFIG.
#
# Data: allenai/c4:en. The paper's Dolmino rows, which have text of benchmarks in them: name the parts, with their shares
# of the 50B mix (arXiv 2501.00656, rounded). Under one name files follow each other, and a budget like this ends in dclm.
#     d=allenai/dolmino-mix-1124
#     DATASET="$d:dclm=47 $d:math=21 $d:flan=17 $d:wiki=7 $d:pes2o=6 $d:stackexchange=2" launch/llama2_7b.sh 5B
# Every document stands between BOS and EOS, so that the model goes on to end its texts; the paper's code puts EOS
# alone behind those of C4.
# Planned peak of a GPU: 29.9 GiB of 80 (`--dry_run` prints it kind by kind). Not run by us yet.
# How to run it, dry or on many machines: launch/recipe.sh.
set -euo pipefail
source "$(dirname "$0")/recipe.sh"

gpus=8
model="${MODEL:-meta-llama/Llama-2-7b-hf}"
case "${1:-}" in
    5B) steps=20000 ;;
    1.25B) steps=4768 ;;
    *) echo "usage: launch/$name.sh 5B|1.25B [flags of launch/train.py]" >&2; exit 2 ;;
esac
budget=$1
shift
folders "${name}_$budget"
train "${STEPS:-$steps}" --deepspeed "${CONFIG:-ds_configs/zero3.json}" \
    --document_frame both --seq_length 4096 --global_batch 64 --micro_batch 2 \
    --activation_checkpointing --learning_rate 1e-4 --warmup 0.05 --min_lr_ratio 0.1 "$@"
export_model
perplexity "$model" 4096
zero_shot "$model" --paper llama2-7b
