# Sourced by the recipes: the way from a dense model to numbers beside the paper's, in four functions.
#
#     launch/qwen3_14b.sh --dry_run         check and describe the whole run here, without GPUs, hub or launcher
#     launch/qwen3_14b.sh                   train, consolidate, verify, evaluate, on the GPUs of this machine
#     HOSTFILE=launch/hostfile.example launch/qwen3_14b.sh      the same on the machines of a hostfile
#     launch/qwen3_14b.sh --resume          continue, after the training too: what is done already is not done again
#
# Further flags go to launch/train.py and win over the recipe's.
#
# What it reads from the environment:
#   HOSTFILE   hostfile of the deepspeed launcher (see hostfile.example), which must be there; empty: this machine
#   GPUS       GPUs that a dry run is for (default: those that the recipe is made for)
#   MODEL      the dense model, a folder or hub id (default: the recipe's)
#   DATASET    --dataset of training, like "allenai/dolmino-mix-1124:flan=0.3 allenai/c4:en=0.7" (default allenai/c4:en)
#   STEPS      --max_steps (default: the recipe's; --epochs takes its place)
#   CONFIG     another DeepSpeed JSON than the recipe's, or the name of one in ds_configs, like zero2
#   OUTPUT     run folder, seen by all machines (default runs/NAME); the sparse model lies beside it, as OUTPUT_2to4
#   LAUNCHER   what starts the ranks instead of deepspeed (slurm.sh sets it)
# Paths in these and in flags are seen from the checkout, that of HOSTFILE from the folder where the recipe is called.
# It does not install: run `source launch/install.sh` once on every machine, or have .venv on a shared disk.

name="$(basename "$0" .sh)"

_refuse() {
    echo "$name: $1" >&2
    exit 2
}

if [ -n "${HOSTFILE:-}" ]; then
    # The launcher would train on this machine alone.
    [ -f "$HOSTFILE" ] || _refuse "HOSTFILE=$HOSTFILE: no such file here; name one, or leave it empty for this machine"
    HOSTFILE="$(cd "$(dirname "$HOSTFILE")" && pwd)/$(basename "$HOSTFILE")"
fi
cd "$(dirname "$0")/.."
if [ -x .venv/bin/python ]; then
    export PATH="$PWD/.venv/bin:$PATH" TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$PWD/.venv/torch_extensions}"
fi

# Sets `run` and `sparse`, the folders of the run and of its result.
folders() { # NAME
    run="${OUTPUT:-runs/$1}"
    sparse="${run}_2to4"
}

# Flags for launch/train.py besides model, text, length and folder. A dry run ends the recipe.
train() { # STEPS FLAGS [flags of the user]
    local flag before="" steps="$1" words trained dry="" launcher=(deepspeed)
    local text=(--dataset ${DATASET:-allenai/c4:en}) length=(--max_steps "$1")
    shift
    words="$(_our_names "$@")"
    while IFS= read -r flag; do
        case "${flag//-/_}" in
            __dry_run) dry=1 ;;
            __dataset | __dataset=*) text=() ;; # launch/train.py would mix it with ours
            __epochs | __epochs=*) length=() ;; # launch/train.py takes one of the two
            __model | __model=*) _refuse "say MODEL=... instead of --model, for the evaluation too" ;;
            __output_dir | __output_dir=*) _refuse "say OUTPUT=... instead of --output_dir, for the export too" ;;
            __max_steps=*) steps="${flag#*=}" ;;
        esac
        if [ "${before//-/_}" = __max_steps ]; then steps="$flag"; fi # the last one counts
        before="$flag"
    done <<<"$words"
    if [ ${#length[@]} -eq 0 ]; then
        [ -z "${STEPS:-}" ] || _refuse "give STEPS or --epochs, not both"
        steps=""
    fi
    if [ -e "$sparse" ] && ! _exported; then
        _refuse "$sparse is there already, and not made of $run as it is; remove it, or give another OUTPUT"
    elif [ -e "$sparse" ]; then # a longer run needs the name at its end
        trained="$(sed -n 's/^  "steps": \([0-9]*\),\{0,1\}$/\1/p' "$run/result.json")"
        if [ "$trained" != "" ] && [ "$trained" -lt "${steps:-0}" ]; then
            _refuse "$sparse is of $trained steps, and $run would go on to $steps; rename or remove $sparse first"
        fi
    fi
    set -- --model "$model" --output_dir "$run" ${text[@]+"${text[@]}"} ${length[@]+"${length[@]}"} "$@"
    if [ -n "$dry" ]; then exec python launch/train.py --gpus "${GPUS:-$gpus}" "$@"; fi
    if [ -n "${HOSTFILE:-}" ]; then launcher+=(--hostfile "$HOSTFILE"); fi
    if [ -n "${LAUNCHER:-}" ]; then read -ra launcher <<<"$LAUNCHER"; fi
    "${launcher[@]}" launch/train.py "$@"
}

# The words of a command line, a line each, with our names in place of those of other trainers, as launch/train.py does.
_our_names() {
    python -c 'import sys
from sparseforge_ds.config.flag_names import ALIASES, with_our_names
print(*with_our_names(sys.argv[1:], {*ALIASES.values()}), sep="\n")' "$@"
}

# The sparse model, and the proof that every group of it is 2:4.
export_model() {
    _exported || python -m sparseforge_ds consolidate "$run" "$sparse"
    python -m sparseforge_ds verify "$sparse"
}

# Whether the sparse model was made after the end of the run, by a recipe that was interrupted in its evaluation.
_exported() {
    [ -e "$run/result.json" ] && [ "$sparse/sparsity.json" -nt "$run/result.json" ]
}

# WikiText-2 as the papers score it: dense and sparse in one dtype, at the same length.
perplexity() { # MODEL SEQ_LENGTH
    local scored
    for scored in "$1" "$sparse"; do
        python -m sparseforge_ds evaluate "$scored" --text wikitext2 --seq_length "$2" --dtype bfloat16
    done
}

# The paper's zero-shot tasks, dense and sparse; needs pip install '.[zero_shot]'.
zero_shot() { # DENSE_MODEL [flags]
    python -m sparseforge_ds evaluate "$sparse" --suite paper --dense "$1" --dtype bfloat16 "${@:2}"
}
