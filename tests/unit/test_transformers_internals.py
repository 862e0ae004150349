from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from sparseforge_ds import transformers_internals
from sparseforge_ds.cli.main import main

ROOT = Path(__file__).parents[2]


def test_every_name_is_there_and_the_range_is_the_package_s() -> None:
    for name in transformers_internals.WHERE:
        assert getattr(transformers_internals, name) is not None
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"transformers{transformers_internals.RANGE}" in dependencies


@pytest.mark.parametrize("module", ["cache_utils", "no_such_module"])
def test_a_release_without_a_name_is_named(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a command, in one line: a model needs `_grouped_linear`, which moved or went."""
    import transformers

    monkeypatch.setitem(transformers_internals.WHERE, "_grouped_linear", module)
    message = f"transformers {transformers.__version__} has no {module}._grouped_linear, which sparseforge_ds needs: "
    with pytest.raises(transformers_internals.TransformersVersionError, match="pip install 'transformers>=") as raised:
        transformers_internals._grouped_linear  # noqa: B018
    assert str(raised.value).startswith(message)
    monkeypatch.setattr("sparseforge_ds.cli.verify.run", lambda args: transformers_internals._grouped_linear)
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
