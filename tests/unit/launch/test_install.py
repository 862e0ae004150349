"""launch/install.sh: what it says when something is missing, and that it does nothing when nothing is to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.distributed import PATIENCE, ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a checkout with nothing installed."""
    (tmp_path / "launch").mkdir()
    for name in ("launch/install.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def _source(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH_EXTENSIONS_DIR"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", 'source launch/install.sh; echo "$MARK in $TORCH_EXTENSIONS_DIR"'],
        cwd=checkout,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def _program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_python_that_is_not_there_is_refused(checkout: Path) -> None:
    result = _source(checkout, PYTHON="python-that-is-not-there")
    assert result.returncode == 1
    assert "no python-that-is-not-there here; install Python 3.11 or later" in result.stderr


def test_an_old_python_is_refused(checkout: Path) -> None:
    old = _program(checkout / "old", '[ "$1" = --version ] && echo "Python 3.8.18" && exit 0; exit 1')
    result = _source(checkout, PYTHON=str(old))
    assert result.returncode == 1
    assert "Python 3.8.18 is too old" in result.stderr


def test_a_python_without_venv_is_refused_with_the_cure(checkout: Path) -> None:
    bare = _program(checkout / "bare", 'case "$2" in *ensurepip*) exit 1;; esac; exit 0')
    result = _source(checkout, PYTHON=str(bare))
    assert result.returncode == 1
    assert "apt install python3-venv" in result.stderr


def test_a_shell_that_sources_it_by_hand_outlives_an_error(checkout: Path) -> None:
    """Its settings are others than those of a script: commands go on behind an error."""
    shell = ["bash", "-c", 'source launch/install.sh; echo "status $?"']
    environment = {**os.environ, "PYTHON": "python-that-is-not-there"}
    result = subprocess.run(shell, cwd=checkout, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert result.stdout == "status 1\n" and "no python-that-is-not-there here" in result.stderr
    # A package that cannot be had leaves no mark that says that all are there.
    _program(checkout / ".venv" / "bin" / "python", 'case "$*" in *"pip install"*) exit 1;; esac')
    result = subprocess.run(shell, cwd=checkout, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert result.stdout.endswith("status 1\n") and not (checkout / ".venv" / "installed").exists()
    (checkout / ".venv" / "bin" / "activate").write_text("")
    assert subprocess.run(["bash", "launch/install.sh"], cwd=checkout, env=environment).returncode == 1


def test_nothing_to_do_runs_no_python(checkout: Path) -> None:
    _program(checkout / ".venv" / "bin" / "python", "echo called >&2; exit 1")
    (checkout / ".venv" / "bin" / "activate").write_text("MARK=activated\n")
    described = subprocess.run(
        "cat pyproject.toml constraints.txt | cksum",
        shell=True,
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    extensions = checkout / ".venv" / "torch_extensions"
    (checkout / ".venv" / "installed").write_text(f"{described} {checkout} {extensions}\n")
    result = _source(checkout)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"activated in {extensions}\n", "")


def test_a_changed_dependency_installs_again(checkout: Path) -> None:
    test_nothing_to_do_runs_no_python(checkout)
    with open(checkout / "constraints.txt", "a") as file:
        file.write("# changed\n")
    result = _source(checkout, PYTHON="python-that-is-not-there")
    assert result.returncode == 1
    assert "no python-that-is-not-there here" in result.stderr
