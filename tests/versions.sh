#!/usr/bin/env bash
# The fast tests with the oldest or the newest packages that pyproject.toml allows, in an environment outside the checkout.
# Needs uv (pip install uv) and some gigabytes; UV_TORCH_BACKEND=cpu takes the CPU build of torch where its index is reached.
#   bash tests/versions.sh lowest /tmp/lowest              from tests/unit, those marked `fast`
#   bash tests/versions.sh newest /tmp/newest tests/zero   other arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
lowest) resolution=lowest-direct ;;
newest) resolution=highest ;;
*)
    echo "usage: bash tests/versions.sh lowest|newest FOLDER [arguments of pytest]" >&2
    exit 2
    ;;
esac
folder="${2:?give a folder for the environment, outside the checkout}"
shift 2
[ $# -gt 0 ] || set -- -m fast tests/unit

[ -x "$folder/bin/python" ] || uv venv -q "$folder"
uv pip compile -q --upgrade --resolution "$resolution" --extra test pyproject.toml --python "$folder/bin/python" -o "$folder/set.txt"
uv pip install -q --python "$folder/bin/python" -r "$folder/set.txt"
grep -E '^(torch|transformers|deepspeed|datasets|numpy)==' "$folder/set.txt"
export PATH="$folder/bin:$PATH" PYTHONPATH="$PWD" OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR="$folder/torch_extensions"
exec python -m pytest -q -n 0 -p no:cacheprovider "$@"
