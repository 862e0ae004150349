#!/usr/bin/env bash
# Installs what is missing, then runs ruff, mypy and the tests, in two processes.
#   bash tests/run.sh                        everything
#   bash tests/run.sh --fast                 the tier that answers in minutes: the marker `fast`
#   bash tests/run.sh --core                 all but the tests of sparseforge_ds/extras: without the marker `extras`
#   bash tests/run.sh tests/unit -k mask     other arguments go to pytest; -n 0 is one process
# The summary of pytest comes last; the exit code is pytest's, or 1 when only ruff or mypy had something to say.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/install.sh

[ "${1:-}" != --fast ] || set -- -m fast "${@:2}"
[ "${1:-}" != --core ] || set -- -m "not extras" "${@:2}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
lint=0
if [ $# -eq 0 ]; then  # the optimizers that tests have DeepSpeed compile, beside ruff and mypy
    for builder in FusedAdamBuilder CPUAdamBuilder; do
        python -c "from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder('$builder').load(verbose=False)" >/dev/null 2>&1 &  # a failure is their tests' to tell
    done
fi
echo "== ruff"
ruff check . || lint=1
echo "== mypy"
mypy || lint=1
[ "$lint" -eq 0 ] || echo "ruff or mypy failed (above); the tests run all the same" >&2
echo "== pytest"
wait  # two compilers beside two processes of tests would make all four slow, and tests wait for them anyway
python -m compileall -q sparseforge_ds tests  # else each of hundreds of processes does it, where bytecode is not kept
# A file's tests stay in one process, which makes what they share once; files start in the order of `testpaths`.
# A process that hangs ends after `faulthandler_timeout`, and all tests with it: another one would hang in the same test.
python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --durations=40 "$@" || exit $?
exit "$lint"
