#!/usr/bin/env bash
# The main job on the embedded model and text: trains a dense model into the 2:4 pattern, exports it, verifies every
# group, evaluates, and prints one table. Installs what it needs into .venv first. Works with GPUs and without.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/install.sh

run=runs/demo
result=runs/demo_2to4
dense=sparseforge_ds/assets/stdlib_llama
reports="$run/reports"

gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" -eq 0 ]; then
    ranks=2
    cores="$(python -c 'import os; print(len(os.sched_getaffinity(0)))')"
    export DS_ACCELERATOR=cpu
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores / ranks > 0 ? cores / ranks : 1))}"
else
    # The batch of 8 sequences is shared out evenly.
    ranks=1
    while [ $((ranks * 2)) -le "$gpus" ] && [ "$ranks" -lt 8 ]; do ranks=$((ranks * 2)); done
fi
port="$(python -c 'from sparseforge_ds.train.launcher import free_port; print(free_port())')"

for folder in "$run" "$result"; do
    if [ -e "$folder" ]; then
        echo "demo: removing $folder of an earlier run"
        rm -rf "$folder"
    fi
done

echo "demo: training on $ranks ranks"
SECONDS=0
deepspeed --num_gpus "$ranks" --master_port "$port" --log_level warning launch/train.py \
    --deepspeed ds_configs/zero3.json --output_dir "$run"
trained="$SECONDS"

echo "demo: export, verification and evaluation"
mkdir -p "$reports"
python -m sparseforge_ds consolidate "$run" "$result"
if ! python -m sparseforge_ds verify "$result" --json "$reports/verify.json" >"$reports/verify.txt"; then
    cat "$reports/verify.txt"
    exit 1
fi
perplexity() {  # MODEL REPORT [flags]
    python -m sparseforge_ds evaluate "$1" --text stdlib:heldout --json "$reports/$2.json" "${@:3}" >"$reports/$2.txt"
}
perplexity "$dense" dense
perplexity "$dense" one_shot --one_shot 2:4
perplexity "$result" sparse

python launch/demo_table.py "$run" "$result" "$reports" "$trained"
