"""`pip install .` from a clean clone gives a whole package: every module, and the demo's model."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "sparseforge_ds", source / "sparseforge_ds", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    expected = {str(path.relative_to(source)) for path in (source / "sparseforge_ds").rglob("*") if path.is_file()}

    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    subprocess.run(command, check=True, timeout=300)

    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("sparseforge_ds/")}
    assert packed == expected
    assert "sparseforge_ds/assets/stdlib_llama/model.safetensors" in packed
    shipped = {f"sparseforge_ds/ds_configs/{path.name}" for path in (ROOT / "ds_configs").iterdir()}
    assert {name for name in packed if name.endswith("zero3.json")} <= shipped <= packed


def test_the_embedded_model_is_small() -> None:
    model = ROOT / "sparseforge_ds" / "assets" / "stdlib_llama" / "model.safetensors"
    assert model.stat().st_size <= 4 * 1024**2
