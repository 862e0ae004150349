"""The YAML file of `--config`: run flags, the `sparseforge` block and the DeepSpeed configuration in one place."""

from __future__ import annotations

import json
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sparseforge_ds.config.arguments import RunArguments, flags
from sparseforge_ds.config.flag_names import ALIASES, name_of
from sparseforge_ds.config.json_file import parse_json
from sparseforge_ds.config.strict import convert

BLOCK = "sparseforge"
"""Key of the block, in the file and in a DeepSpeed JSON."""
_NOT_IN_A_FILE = {"local_rank", "config", "print_config"}
_HINTS = {name: hint for name, hint in typing.get_type_hints(RunArguments).items() if name not in _NOT_IN_A_FILE}


@dataclass(frozen=True)
class RunFile:
    """Content of a run file, with values of the types of the flags."""

    flags: dict[str, Any]
    """Values by the names of flags. `deepspeed` is the path of the run file where its configuration is inline."""
    deepspeed: dict[str, Any] | None
    """DeepSpeed configuration of the file; None where it is a path, or missing."""
    block: dict[str, Any] | None
    """Keys that win over those of the configuration's `sparseforge` block; None where there are none."""


class UnknownKeyError(ValueError):
    """Error about a key of a run file that is no flag; `key` is its name."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def read_run_file(path: str) -> RunFile:
    """Read a run file.

    Raises:
        UnknownKeyError: a key is neither a flag nor `sparseforge`.
        ValueError: the file cannot be read, is no YAML, or a value has the wrong type.
    """
    name = f"--config {path}"
    content = _plain_content(path, name)
    if not isinstance(content, dict):
        raise ValueError(f"{name}: no keys; write flags as keys, like max_steps: 400")

    # Convert every value to the type of its flag.
    values: dict[str, Any] = {}
    block: dict[str, Any] | None = None
    inline: dict[str, Any] | None = None
    for key, value in content.items():
        flag = key if key == BLOCK else _flag_of(key)
        if flag in _NOT_IN_A_FILE:
            raise ValueError(f"{name}: {key} belongs to the command line alone; remove it")
        if flag in values or flag == "deepspeed" and inline is not None:
            raise ValueError(f"{name}: key {json.dumps(key)} is {flag}, which comes twice; keep one of them")
        if flag == BLOCK:
            block = convert({} if value is None else value, dict[str, Any], f"{name}: {key}")
        elif flag == "deepspeed" and isinstance(value, dict):
            inline = value
        elif flag not in _HINTS:
            raise UnknownKeyError(key)
        else:
            if flag == "lr_scheduler_kwargs" and isinstance(value, dict):
                value = json.dumps(value)  # an object of YAML is plainer than JSON in a text
            is_single = _HINTS[flag] == list[str] and isinstance(value, str)
            values[flag] = convert([value] if is_single else value, _HINTS[flag], f"{name}: {key}")
    if inline is not None:
        values["deepspeed"] = path
    return RunFile(values, inline, block)


def run_file_text(arguments: RunArguments, deepspeed: dict[str, Any], block: dict[str, Any]) -> str:
    """Return the text of a run file that makes the same run.

    Args:
        arguments: the run flags.
        deepspeed: the DeepSpeed configuration; its `sparseforge` block is left out.
        block: the `sparseforge` block.
    """
    content = {name: value for name, value in flags(arguments).items() if name != "deepspeed"}
    content["deepspeed"] = {key: value for key, value in deepspeed.items() if key != BLOCK}
    # A seed of the block would win over a --seed beside the file.
    content[BLOCK] = {key: value for key, value in block.items() if key != "seed" or value != arguments.seed}
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _flag_of(key: str) -> str:
    """Return the flag that a key stands for, or the key itself."""
    name = name_of(key)
    return ALIASES.get(name, name)


def _plain_content(path: str, name: str) -> Any:
    """Read YAML as plain JSON types, as strictly as a DeepSpeed JSON is read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file; give a YAML file, as --print_config prints it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: not a readable YAML file ({error})") from None
    try:
        as_json = json.dumps(yaml.load(text, _Loader))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not a readable YAML file ({' '.join(str(error).split())})") from None
    return parse_json(as_json, name)


class _Loader(yaml.SafeLoader):
    """Loader with the scalars of YAML 1.2: PyYAML's own takes 2:4 for the number 124, and 1e-4 for text."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        # Python would keep the last of two equal keys.
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {json.dumps(key)} comes twice in one object; keep one of them")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which either version of YAML would take for something else."""


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("merge", "<<", ["<"]),
):
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)
