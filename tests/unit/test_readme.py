"""The README's reference of the `sparseforge` block has every key, with its true default."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

from sparseforge_ds.config import PRESETS, SparseForgeConfig

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def _defaults(kind: type, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        choices = (hints[field.name], *typing.get_args(hints[field.name]))
        inner = [choice for choice in choices if dataclasses.is_dataclass(choice)]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if not inner:
            found[prefix + field.name] = json.loads(json.dumps(default))
            continue
        if type(None) in choices:
            found[prefix + field.name] = None if default is None else {}
        found |= _defaults(typing.cast(type, inner[0]), f"{prefix}{field.name}.")
    return found


def test_every_key_with_its_default() -> None:
    section = README.split("## The `sparseforge` block")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_.]+)` \| `([^`]+)` \|", section, flags=re.MULTILINE)
    assert {key: json.loads(default) for key, default in rows} == _defaults(SparseForgeConfig)
    assert len(rows) == len(_defaults(SparseForgeConfig))


def test_every_preset_is_named() -> None:
    for preset in PRESETS:
        assert f"`{preset}`" in README
