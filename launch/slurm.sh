#!/usr/bin/env bash
#SBATCH --job-name=sparseforge
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@900
#SBATCH --requeue
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# A recipe as a Slurm job, from the checkout on a disk that all nodes share:
#
#     sbatch launch/slurm.sh launch/qwen3_14b.sh                 # flags of sbatch before, of the recipe behind
#     sbatch --nodes=1 launch/slurm.sh launch/llama2_7b.sh 5B
#
# Slurm starts the ranks itself, so that its SIGTERM reaches them: 900 s before the end of the time they save and end
# with exit code 143, and the job is queued again and goes on from there.
set -euo pipefail

if [ "${1:-}" = --rank ]; then # one of the processes that srun starts
    shift
    export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"
    export WORLD_SIZE="$SLURM_NTASKS" LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE"
    exec python "$@"
fi
if [ $# -lt 1 ] || [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "usage: sbatch launch/slurm.sh RECIPE [flags of the recipe]" >&2
    exit 2
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${nodes[0]}" MASTER_PORT=$((20000 + SLURM_JOB_ID % 12768)) # ephemeral ports begin at 32768
# srun of Slurm 22.05 and later does not take over --cpus-per-task, and would leave every rank one core.
cores="${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
export LAUNCHER="srun --kill-on-bad-exit=1 $cores bash launch/slurm.sh --rank"
code=0
bash "$@" --resume auto || code=$?
if [ "$code" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
