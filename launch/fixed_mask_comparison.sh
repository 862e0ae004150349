#!/usr/bin/env bash
# Soft mask against fixed masks on one model and one text: same steps, same data order, same teacher, same learning rate.
#
#     bash launch/fixed_mask_comparison.sh MODEL TRAIN_TEXT HELDOUT_TEXT [STEPS] [SEED]
#
# Prints held-out perplexity of the dense model, of one-shot magnitude and Wanda 2:4, of both fixed masks retrained, of
# SparseForge with the paper's literal choices (preset paper_like_no_low_rank) and with its defaults. The last two rows have a
# start too, which reads the first tokens of the text several times: a fixed mask, and SparseForge as ds_configs/zero3.json has it.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
absolute() { # a file or folder as it is called from anywhere; all else, like an id of the hub, as it is
    case "$1" in
        /*) echo "$1" ;;
        *) if [ -e "$1" ]; then echo "$PWD/$1"; else echo "$1"; fi ;;
    esac
}
model="$(absolute "$1")" text="$(absolute "$2")" heldout="$(absolute "$3")" steps=${4:-400} seed=${5:-0}
cd "$(dirname "$0")/.."
source launch/install.sh

gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" -eq 0 ]; then
    ranks=2
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
else
    # The batch of 8 sequences is shared out evenly.
    ranks=1
    while [ $((ranks * 2)) -le "$gpus" ] && [ "$ranks" -lt 8 ]; do ranks=$((ranks * 2)); done
fi
folder="runs/fixed_mask_comparison_$(basename "$model")_$(basename "$text")_steps${steps}_seed$seed"
if [ -e "$folder/table.txt" ]; then
    echo "error: $folder: results of an earlier call are there; move or remove the folder" >&2
    exit 1
fi
mkdir -p "$folder"

perplexity() { # name, model and flags
    local name=$1
    shift
    python -m sparseforge_ds evaluate "$@" --text "$heldout" --json "$folder/$name.json" >/dev/null
    python - "$name" "$folder/$name.json" <<'PYTHON' | tee -a "$folder/table.txt"
import json
import sys

print(f"{sys.argv[1]:<20} {json.load(open(sys.argv[2]))['perplexity']['perplexity']:9.3f}", flush=True)
PYTHON
}

logged() { # command; shows the end of the log of `name` where it fails
    "$@" >>"$folder/$name.log" 2>&1 || { tail -n 20 "$folder/$name.log" >&2; exit 1; }
}

train() { # name, sparseforge block (null: the shipped one), steps
    local name=$1 block=$2 port
    shift 2
    python -c '
import json, sys
content = json.load(open("ds_configs/zero3.json"))
block = json.loads(sys.argv[1])
content["sparseforge"] = content["sparseforge"] if block is None else block
json.dump(content, open(sys.argv[2], "w"))' "$block" "$folder/$name.ds.json"
    port="$(python -c 'from sparseforge_ds.train.launcher import free_port; print(free_port())')"
    logged deepspeed --num_gpus "$ranks" --master_port "$port" launch/train.py \
        --deepspeed "$folder/$name.ds.json" --model "$model" --dataset "$text" --seed "$seed" \
        --output_dir "$folder/$name" "$@"
    logged python -m sparseforge_ds consolidate "$folder/$name" "$folder/${name}_2to4"
    logged python -m sparseforge_ds verify "$folder/${name}_2to4"
    perplexity "$name" "$folder/${name}_2to4"
}

echo "held-out perplexity per token, seed $seed, $steps steps"
perplexity dense "$model"
perplexity one_shot_magnitude "$model" --one_shot 2:4
name=one_shot_wanda
logged python -m sparseforge_ds prune "$model" "$folder/${name}_2to4" --text "$text" --mask wanda --epochs 0
perplexity "$name" "$folder/${name}_2to4"
train fixed_magnitude '{"method": "naive_retrain"}' --max_steps "$steps"
train fixed_wanda '{"method": "naive_retrain", "importance": "wanda"}' --max_steps "$steps"
train sparseforge_paper '{"preset": "paper_like_no_low_rank"}' --max_steps "$steps"
train sparseforge '{}' --max_steps "$steps"
train start_fixed '{"method": "naive_retrain", "start": {}}' --max_steps "$steps"
train start_sparseforge null --max_steps "$steps"
