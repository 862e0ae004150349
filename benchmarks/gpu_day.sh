#!/usr/bin/env bash
# What one GPU should settle in at most ten minutes, in the order of what it settles.
#   bash benchmarks/gpu_day.sh OUT            every part
#   bash benchmarks/gpu_day.sh OUT cost bench only these
# Every part has a limit in seconds and a log in OUT; one that fails or is too slow costs that part only. OUT/parts.tsv
# says how each ended. From the environment:
#   GPU_DAY_DEVICE=cpu   the same parts with tiny sizes on a machine without a GPU, which is what a test runs
set -uo pipefail
cd "$(dirname "$0")/.."
out="${1:?usage: bash benchmarks/gpu_day.sh OUT [PART ...]}"
shift
device="${GPU_DAY_DEVICE:-cuda}"
parts="tests fused cost frozen staged bench linear overlap optimizer"
if [ "$device" = cpu ]; then parts="fused tests cost frozen"; fi
wanted=" ${*:-$parts} "
for name in $wanted; do
    # A part that is not there would be silence, and the day over.
    [[ " $parts " == *" $name "* ]] || { echo "gpu_day: $name: no such part on $device; use some of: $parts" >&2; exit 2; }
done
mkdir -p "$out"
out="$(cd "$out" && pwd)"
# DeepSpeed cannot read an architecture like 9.0a, which some images list.
# Random weights of a large model take a single thread longer than what is measured on them.
export OMP_NUM_THREADS="${GPU_DAY_THREADS:-$(nproc)}"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TORCH_CUDA_ARCH_LIST="${GPU_DAY_ARCH:-9.0}"
begun=$SECONDS
printf 'part\tseconds\texit\n' >"$out/parts.tsv"

part() {  # NAME LIMIT COMMAND...
    local name="$1" limit="$2" started=$SECONDS code=0
    shift 2
    [[ "$wanted" == *" $name "* ]] || return 0
    # The day ends after ten minutes: what comes last gets what is left of them.
    local left=$((600 - (SECONDS - begun)))
    limit=$((limit < left ? limit : left))
    if ((limit < 10)); then
        printf '%s\t0\t124\n' "$name" >>"$out/parts.tsv"
        return 0
    fi
    echo "== $((SECONDS - begun)) s: $name"
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1 || code=$?
    grep -v -e '\[INFO\]' -e '\[WARNING\]' -e '^$' "$out/$name.log" | tail -n 40
    printf '%s\t%d\t%d\n' "$name" $((SECONDS - started)) "$code" >>"$out/parts.tsv"
}

deepspeed_run() { python3 -m deepspeed.launcher.runner --num_gpus 1 --master_port "${GPU_DAY_PORT:-29731}" "$@"; }
export -f deepspeed_run

if [ "$device" = cpu ]; then
    sizes="--stage 1 --dtype bf16 --hidden 64 --layers 1 --seq 32 --vocabulary 128 --accumulation 2 --update_every 2 --steps 4"
    part fused 120 python3 -m benchmarks.fused_functions --device cpu --shapes 64x64 --tokens 32 --vocabulary 256 --json "$out/fused.json"
    part tests 120 python3 -m pytest -q -m gpu -p no:cacheprovider tests/unit/mask/kernels/test_fused_on_gpu.py
    part cost 120 bash -c "deepspeed_run benchmarks/step_cost.py $sizes --json '$out/cost.json'"
    part frozen 120 bash -c "deepspeed_run benchmarks/step_cost.py $sizes --phase frozen --json '$out/frozen.json'"
else
    sizes="--stage 1 --dtype bf16 --hidden 2048 --layers 12 --seq 1024 --micro_batch 4 --vocabulary 32000 --accumulation 4 --steps 40"
    # 1: numbers of fused functions against the CPU, before anything is timed; then their bytes a second.
    part tests 90 python3 -m pytest -q -m gpu -p no:cacheprovider tests/unit/mask/kernels/test_fused_on_gpu.py \
        tests/zero/test_tiled_shards.py
    part fused 60 python3 -m benchmarks.fused_functions --shapes 576x576 17408x5120 --json "$out/fused.json"
    # 2: a training step beside plain DeepSpeed, while masks harden and when they are frozen, in four blocks for quartiles.
    part cost 130 bash -c "deepspeed_run benchmarks/step_cost.py $sizes --json '$out/cost.json'"
    part frozen 110 bash -c "deepspeed_run benchmarks/step_cost.py $sizes --phase frozen --json '$out/frozen.json'"
    # 3: 33 to 256 rows by SPARSEFORGE_STAGED=1: right, and beside today's way and cuBLAS; each line ends with the fastest.
    part staged 90 bash -c "python3 -m pytest -q -m gpu -p no:cacheprovider tests/unit/extras/packed24/test_mma_on_gpu.py \
        -k 'staged_rows and (None-None or small and dtype0)' && python3 -m benchmarks.linear24 --device cuda --dtypes bfloat16 --repeats 5 --staged \
        --rows 33 48 64 96 128 192 256 --shapes 4096x4096 12288x4096 22016x4096 4096x11008 7168x5120 5120x17408 34816x5120"
    # 4: a packed model at work, in CUDA graphs.
    part bench 150 python3 -m sparseforge_ds bench --shapes llama-2-7b --layers 8 --batches 1 8 --workload 128x128 --out "$out/bench"
    # 12288 outputs beside three times 4096, and 22016 beside twice 11008: what q, k, v and gate, up gain as one product.
    part linear 60 python3 -m benchmarks.linear24 --device cuda --dtypes bfloat16 --rows 1 8 32 64 128 \
        --shapes 4096x4096 12288x4096 11008x4096 22016x4096 4096x11008 7168x5120 34816x5120
    # Weights on their way before the kernel ahead has ended: right, and beside the same rows and shapes of `linear`.
    part overlap 70 env SPARSEFORGE_OVERLAP=1 bash -c "python3 -m pytest -q -m gpu -p no:cacheprovider \
        tests/unit/extras/packed24/test_mma_on_gpu.py -k 'not staged' && python3 -m benchmarks.linear24 --device cuda \
        --dtypes bfloat16 --rows 1 8 --shapes 4096x4096 12288x4096 22016x4096 4096x11008"
    # 5: DeepSpeed's FusedAdam through the whole life of a mask.
    part optimizer 120 python3 -m pytest -q -x -m gpu -p no:cacheprovider tests/zero/test_own_optimizers.py -k whole_life
fi
echo "== $((SECONDS - begun)) s: done"
cat "$out/parts.tsv"
