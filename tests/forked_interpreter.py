"""Interpreters that have imported transformers already: `python -c`, forked from a server, for what costs seconds anew.

The server has nothing of ours and no model. A script that it forks has arguments, environment, working folder and
output of its own, like one in a new process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

import psutil

run_anew = subprocess.run
_OF_A_PROOF = "import gc\ngc.disable()\nimport transformers.modeling_utils\n"
"""Beginning of the scripts of `sparseforge_ds.export.proof`."""
_AS_PROOFS = {
    **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    "CUDA_VISIBLE_DEVICES": "",
}
"""Variables that proofs set; with them the scripts of tests are served by the same server."""
_READ_BY_IMPORTS = ("CUDA_", "DS_", "HF_", "OMP_", "TORCH_", "TRANSFORMERS_")
"""Beginnings of variables that libraries read once: a server serves scripts that have the same ones."""


def run(command: Any, *args: Any, **kwargs: Any) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does, by a fork where the command is a script that begins with a proof's imports."""
    is_script = isinstance(command, list) and command[:2] == [sys.executable, "-c"]
    if is_script and command[2].startswith(_OF_A_PROOF):
        return run_script(command[2], *command[3:], cwd=kwargs["cwd"], env=kwargs["env"])
    return run_anew(command, *args, **kwargs)


def run_script(
    script: str, *arguments: str, cwd: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -c SCRIPT ARGUMENTS`, by default without network and GPU, and capture its output."""
    from tests.distributed import PATIENCE  # which the server does without

    environment = {**os.environ, **_AS_PROOFS} if env is None else env
    server = _server(tuple(sorted(pair for pair in environment.items() if pair[0].startswith(_READ_BY_IMPORTS))))
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        output, errors = (Path(folder, name) for name in ("output", "errors"))
        request = {"script": script, "arguments": arguments, "cwd": str(cwd), "environment": environment}
        server.stdin.write(json.dumps({**request, "output": str(output), "errors": str(errors)}) + "\n")
        server.stdin.flush()
        answer = select.poll()  # which takes descriptors above 1023
        answer.register(server.stdout, select.POLLIN)
        while not answer.poll(PATIENCE * 1000):
            for process in psutil.Process(server.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGABRT)  # it writes its stacks into `errors`, and ends
        line = server.stdout.readline()
        assert line, f"the server of scripts has ended with {server.wait()}"
        code = int(line)
        command = [sys.executable, "-c", script, *arguments]
        return subprocess.CompletedProcess(command, code, output.read_text(), errors.read_text())


@functools.cache
def _server(variables: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """Start a server, which ends when its standard input does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_READ_BY_IMPORTS)}
    environment.pop("PYTHONPATH", None)
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**environment, **dict(variables)},
    )


def _serve() -> None:
    """Fork a script for every line of standard input, and print its exit code."""
    import gc

    gc.disable()
    import safetensors.torch  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    gc.freeze()  # a collection in a fork need not walk, and thereby copy, what all share
    gc.enable()
    del sys.path[0]  # this file's folder
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(request: dict[str, Any]) -> NoReturn:
    """Run a script in this process, and end it."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for stream, path in enumerate((os.devnull, request["output"], request["errors"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), stream)
    faulthandler.enable(sys.__stderr__)
    sys.argv = ["-c", *request["arguments"]]
    sys.path[:0] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    code: Any = 0
    try:
        exec(compile(request["script"], "<string>", "exec"), module.__dict__)
    except SystemExit as stop:
        code = stop.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001 (as the interpreter does with whatever ends a script)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
