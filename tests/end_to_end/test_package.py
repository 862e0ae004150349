"""`pip install .` from a clean clone gives a whole package: every module, the demo's model, and training."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.distributed import PATIENCE, ROOT

PIP = [sys.executable, "-m", "pip"]


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in ("sparseforge_ds", "ds_configs"):  # the package has a link to the latter, as in a clone
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    assert (source / "sparseforge_ds" / "ds_configs").is_symlink()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    expected = {str(path.relative_to(source)) for path in (source / "sparseforge_ds").rglob("*") if path.is_file()}
    expected |= {f"sparseforge_ds/ds_configs/{path.name}" for path in (ROOT / "ds_configs").iterdir()}

    # As `python -m build` does: the source distribution first, and the wheel from what is in it.
    packing = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    packed_source = subprocess.run(
        [sys.executable, "-c", packing], cwd=source, check=True, timeout=PATIENCE, capture_output=True, text=True
    )
    assert "would be ignored" not in packed_source.stdout + packed_source.stderr, "setuptools warns of data folders"
    (archive_of_source,) = tmp_path.glob("*.tar.gz")
    made = [*PIP, "wheel", "-v", "--no-deps", "-w", str(tmp_path), str(archive_of_source)]
    building = subprocess.run(made, check=True, timeout=PATIENCE, capture_output=True, text=True)
    assert "would be ignored" not in building.stdout + building.stderr, "setuptools warns of data folders"

    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("sparseforge_ds/")}
    assert packed == expected
    assert "sparseforge_ds/assets/stdlib_llama/model.safetensors" in packed

    subprocess.run([*PIP, "install", "-q", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    trained = subprocess.run(
        [sys.executable, "-m", "sparseforge_ds", "train", "--deepspeed", "zero3", "--dry_run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert trained.returncode == 0, trained.stderr
    assert "ZeRO-3" in trained.stdout


def test_the_embedded_model_is_small() -> None:
    model = ROOT / "sparseforge_ds" / "assets" / "stdlib_llama" / "model.safetensors"
    assert model.stat().st_size <= 4 * 1024**2
