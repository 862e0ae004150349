"""A forked script is like one in a new process, but for what it finds imported."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.proof import prove_folder
from tests import distributed, forked_interpreter
from tests.forked_interpreter import run_script
from tests.sparse_folders import write_dense, write_sparse

SCRIPT = """
import os, sys
print(__name__, sys.argv, os.getcwd(), os.environ["NAME"], "OTHER" in os.environ, sys.stdin.read())
assert "transformers" in sys.modules and not {"sparseforge_ds", "deepspeed", "tests"} & set(sys.modules)
import beside, on_the_way
os.environ["OTHER"] = "set"
if sys.argv[1] == "raise":
    raise ValueError("as it should")
sys.exit("so much")
"""


def test_a_script_has_its_own_arguments_environment_folder_output_and_exit_code(tmp_path: Path) -> None:
    (tmp_path / "way").mkdir()
    (tmp_path / "beside.py").touch()
    (tmp_path / "way" / "on_the_way.py").touch()
    environment = {**os.environ, "NAME": "one", "PYTHONPATH": str(tmp_path / "way")}
    for word, last in (("raise", "ValueError: as it should"), ("exit", "so much")):
        done = run_script(SCRIPT, word, cwd=tmp_path, env=environment)
        assert done.stdout == f"__main__ ['-c', '{word}'] {tmp_path} one False \n"
        assert (done.returncode, done.stderr.splitlines()[-1]) == (1, last)
    assert run_script("import os; os.kill(os.getpid(), 9)", cwd=tmp_path).returncode == -9
    assert run_script("", cwd=tmp_path).returncode == 0


def test_a_script_that_hangs_is_ended_with_its_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_script("", cwd=tmp_path).returncode == 0, "the server is there"
    monkeypatch.setattr(distributed, "PATIENCE", 5.0)
    done = run_script("def waiting():\n    import time; time.sleep(600)\nwaiting()", cwd=tmp_path)
    assert done.returncode == -signal.SIGABRT and "in waiting" in done.stderr
    assert run_script("", cwd=tmp_path).returncode == 0


def test_a_proof_is_forked_and_a_new_process_proves_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(write_sparse(tmp_path / "sparse", write_dense(tmp_path / "dense", "llama"), "llama"))
    forked = []
    run = forked_interpreter.run_script
    monkeypatch.setattr(forked_interpreter, "run_script", lambda *a, **k: forked.append(run(*a, **k)) or forked[-1])
    proof = prove_folder(source, tmp_path / "sparse", plain=True)
    assert len(forked) == 1
    monkeypatch.setattr(subprocess, "run", forked_interpreter.run_anew)
    assert prove_folder(source, tmp_path / "sparse", plain=True) == proof and len(forked) == 1
