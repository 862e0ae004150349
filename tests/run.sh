#!/usr/bin/env bash
# Installs what is missing, then runs ruff, mypy and the tests. Arguments go to pytest: bash tests/run.sh tests/unit -k mask
# The summary of pytest comes last; the exit code is pytest's, or 1 when only ruff or mypy had something to say.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/install.sh

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
lint=0
echo "== ruff"
ruff check . || lint=1
echo "== mypy"
mypy || lint=1
[ "$lint" -eq 0 ] || echo "ruff or mypy failed (above); the tests run all the same" >&2
echo "== pytest"
python -m pytest -q "$@" || exit $?
exit "$lint"
