# Sourced by launch/demo.sh and tests/run.sh: makes .venv in the checkout, installs into it, and activates it.
# Quick when there is nothing to do. What it reads from the environment:
#   PYTHON                   interpreter of the new .venv (default python3; 3.11 or later)
#   SPARSEFORGE_TORCH_INDEX  package index of torch alone, such as https://download.pytorch.org/whl/cpu, which spares a
#                            machine without an NVIDIA GPU some gigabytes of CUDA libraries
#   TORCH_EXTENSIONS_DIR     where DeepSpeed keeps what it compiles (default .venv/torch_extensions)

_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_venv="$_root/.venv"

_die() {
    printf 'install: %s\n' "$@" >&2
    exit 1
}

_make_venv() {
    local python="${PYTHON:-python3}"
    command -v "$python" >/dev/null || _die "no $python here; install Python 3.11 or later, or name one: PYTHON=python3.12 bash ..."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        _die "$("$python" --version) is too old; install Python 3.11 or later, or name one: PYTHON=python3.12 bash ..."
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        _die "$python cannot make virtual environments; install its venv package (Debian and Ubuntu: apt install python3-venv)"
    echo "install: making $_venv with $("$python" --version)"
    "$python" -m venv "$_venv"
}

_install_packages() {
    echo "install: packages into $_venv (the first time takes minutes)"
    if ! "$_venv/bin/python" -c 'import torch' 2>/dev/null; then
        local index=()
        if [ -n "${SPARSEFORGE_TORCH_INDEX:-}" ]; then
            index=(--index-url "$SPARSEFORGE_TORCH_INDEX")
        elif ! command -v nvidia-smi >/dev/null; then
            echo "install: no NVIDIA GPU here; SPARSEFORGE_TORCH_INDEX=https://download.pytorch.org/whl/cpu makes the download smaller"
        fi
        "$_venv/bin/python" -m pip install -q --disable-pip-version-check ${index[@]+"${index[@]}"} "$(grep '^torch==' "$_root/constraints.txt")"
    fi
    "$_venv/bin/python" -m pip install -q --disable-pip-version-check -c "$_root/constraints.txt" -e "$_root[test]"
}

# On a CPU, DeepSpeed compiles its shared-memory op whenever processes meet; done here once, it is found ready later.
_compile_op() {
    "$_venv/bin/python" -c 'import sys, torch; sys.exit(torch.cuda.is_available())' || return 0  # GPUs do without
    [ -z "$(find "$TORCH_EXTENSIONS_DIR" -name 'deepspeed_shm_comm*.so' 2>/dev/null)" ] || return 0
    command -v "${CXX:-g++}" >/dev/null ||
        _die "no C++ compiler (${CXX:-g++}), which DeepSpeed needs on a machine without a GPU; install one (Debian and Ubuntu: apt install g++)"
    "$_venv/bin/python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        _die "no Python.h, which DeepSpeed needs to compile; install the headers (Debian and Ubuntu: apt install python3-dev)"
    local log="$_venv/compile.log"
    # With the ninja that training finds: another one's log of the build would have it compiled once more.
    PATH="$_venv/bin:$PATH" DS_ACCELERATOR=cpu "$_venv/bin/python" -c '
import logging, os
from deepspeed.accelerator import get_accelerator
from sparseforge_ds.extension_locks import clear_extension_locks
logging.basicConfig(stream=os.fdopen(3, "w"), format="%(message)s", level=logging.WARNING)
logging.getLogger("sparseforge_ds").setLevel(logging.INFO)
clear_extension_locks()  # of an interrupted build, for one
get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
from sparseforge_ds.extras.packed24.cpu_kernel import load_cpu_kernel
load_cpu_kernel()  # the packed product; without it the reference works' 3>&1 >"$log" 2>&1 ||
        _die "DeepSpeed could not compile its CPU communication op; the log is $log:" "$(tail -n 20 "$log")"
}

_install() {
    local stamp="$_venv/installed" wanted
    [ -x "$_venv/bin/python" ] || _make_venv
    wanted="$(cat "$_root/pyproject.toml" "$_root/constraints.txt" | cksum) $_root $TORCH_EXTENSIONS_DIR"
    [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    "$_venv/bin/python" -m pip --version >/dev/null 2>&1 || _make_venv  # one that was interrupted
    _install_packages
    _compile_op
    echo "$wanted" >"$stamp"
}

export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$_venv/torch_extensions}"
mkdir -p "$TORCH_EXTENSIONS_DIR"
if command -v flock >/dev/null; then
    # Two scripts started at once do not install into each other.
    exec 9>"$_root/.venv.lock"
    flock 9
fi
# By itself, as an error must neither end the shell that sources this by hand nor be passed over in it.
(set -e; _install)
_status=$?
exec 9>&-
[ "$_status" -eq 0 ] || return "$_status" 2>/dev/null || exit "$_status" # sourced, or called
source "$_venv/bin/activate"
