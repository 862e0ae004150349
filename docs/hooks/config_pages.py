"""The reference of the `sparseforge` block and the table of model families, written from the code."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from sparseforge_ds.config import METHODS, PRESETS, SparseForgeConfig
from sparseforge_ds.config import refused_settings as refused_settings_module
from sparseforge_ds.config.method_config import OPTIONAL
from sparseforge_ds.config.strict import dataclass_options, key_of
from sparseforge_ds.extras.studies.settings import CompareConfig
from sparseforge_ds.model.family_table import FAMILIES

_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text"}

_INTRODUCTION = """\
# The `sparseforge` block

*Written from the docstrings of the config dataclasses.* A DeepSpeed JSON has one object more than DeepSpeed needs,
`"sparseforge": {}`, which decides which weights survive. Every key is optional. An unknown key, a wrong type or an
impossible value is an error that names the key, the value and the cure.

Ramps such as `[0.0, 0.2]` are fractions of `max_steps`, so that a setting fits every run length. In short runs they
are rounded so that masks are updated at least once before they freeze, which takes 2 steps.

`"method"` says which rule forms the mask: a name, as in `"method": "ast"`, or an object with the name and the method's
own keys, as in `"method": {"name": "ast", "decay": 1e-4}`. Without a name it is `sparseforge`, so that
`"method": {"hardening": [0, 0.3]}` gives the default another ramp. A key of another method is an error.
`"preset"`, a key too, names [what a block starts from](#presets).

Where to go on: [what the keys of the schedule do](../concepts/schedule.md), [the equations](../concepts/equations.md),
[curvature](../concepts/curvature.md), [low-rank branches](../concepts/low-rank.md),
[run flags](command-line.md#sparseforge-train).
"""


def config_page() -> str:
    """The whole page."""
    sections = [_INTRODUCTION]
    for where, kind in objects(SparseForgeConfig):
        title = f"## {_title(kind, where)}" if where else "## Keys of the block itself"
        text = "" if not where else _linked(paragraph(inspect.getdoc(kind) or "")) + "\n\n"
        rows = "".join(
            f"| {_anchor(kind, key, hint)}`{key}` | {_kind(hint)} | `{json.dumps(default)}` | {_linked(meaning)} |\n"
            for key, hint, default, meaning in keys(kind, where)
        )
        sections.append(f"{title}\n\n{text}| key | values | default | meaning |\n|---|---|---|---|\n{rows}")
    return "\n".join([*sections, _methods(), _presets()])


def objects(kind: type, where: str = "") -> Iterator[tuple[str, type]]:
    """(dotted path, dataclass) of a config and of every object inside it."""
    yield where, kind
    for name, hint in _hints(kind).items():
        for inner in dataclass_options(hint):
            yield from objects(inner, f"{where}.{name}".lstrip("."))


def keys(kind: type, where: str) -> Iterator[tuple[str, Any, Any, str]]:
    """(dotted key, type, default as JSON, docstring) of the fields of one dataclass."""
    texts = field_docstrings(kind)
    hints = _hints(kind)
    for field in dataclasses.fields(kind):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        hint = hints[field.name]
        inner = dataclass_options(hint)
        text = texts.get(field.name, "")
        if len(inner) > 1:
            text += " Keys of " + ", ".join(f"[`{each.name}`](#{_place(each, field.name)})" for each in inner) + "."
            default = {}
        elif inner:
            more = ", or null" if type(None) in typing.get_args(hint) else ""
            text = text or paragraph((inspect.getdoc(inner[0]) or "").split("\n\n")[0])
            text += f" An object{more}: [its keys](#{_place(inner[0], f'{where}.{field.name}')})."
            default = None if default is None else {}
        yield f"{where}.{key_of(field.name)}".lstrip("."), hint, default, text


def field_docstrings(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass, or of the one that it inherits the field from."""
    if not dataclasses.is_dataclass(kind):
        return {}
    found = {name: text for parent in kind.__bases__ for name, text in field_docstrings(parent).items()}
    (body,) = (node for node in ast.parse(textwrap.dedent(inspect.getsource(kind))).body)
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = paragraph(str(text.value.value))
    return found


def paragraph(text: str) -> str:
    """On one line, as a table cell needs it."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def compare_table() -> str:
    """The keys of the file that `sparseforge compare` reads."""
    texts = field_docstrings(CompareConfig)
    rows = []
    for field in dataclasses.fields(CompareConfig):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        given = "required" if default is dataclasses.MISSING else f"`{json.dumps(default)}`"
        rows.append(f"| `{field.name}` | {given} | {texts[field.name]} |\n")
    return "| key | default | meaning |\n|---|---|---|\n" + "".join(rows)


def refused_table() -> str:
    """What a DeepSpeed JSON may not say: the messages of `refused_setting`."""
    tree = ast.parse(inspect.getsource(refused_settings_module.refused_setting))
    (table,) = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "refusals"
    )
    assert isinstance(table, ast.List)
    rows = []
    for entry in table.elts:
        assert isinstance(entry, ast.Tuple)
        said = template(entry.elts[1], vars(refused_settings_module))
        rows.append(f"| {paragraph(said)} |\n")
    return "| message |\n|---|\n" + "".join(rows)


def template(node: ast.expr, names: dict[str, Any]) -> str:
    """The text of a string expression, with `<name>` where a value is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        if isinstance(node.value, ast.Name) and isinstance(names.get(node.value.id), str):
            return str(names[node.value.id])
        return "…"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left, names) + template(node.right, names)
    if isinstance(node, ast.Name):
        return str(names.get(node.id, "…"))
    return "…"


def family_page() -> str:
    """Which weights of which family are pruned."""
    same: dict[Any, list[str]] = {}
    for name, family in FAMILIES.items():
        same.setdefault(family, []).append(name)
    rows = "".join(
        f"| {', '.join(f'`{name}`' for name in names)} | {_globs([row.names for row in family.prunable])} "
        f"| {_globs(family.dense)} |\n"
        for family, names in same.items()
    )
    return (
        "# Model families\n\n*Written from `sparseforge_ds/model/family_table.py`.* A family is a row of this table: "
        "globs over parameter names, without the prefix that the surrounding class adds. Biases and norms are no "
        "matrices and stay dense.\n\nWhere to go on: [mixtures of experts](../guides/mixtures.md), [a model that is "
        "not here](../guides/troubleshooting.md#a-model-that-the-table-does-not-know), "
        "[limits](../limits.md).\n\n| `model_type` | pruned | dense |\n|---|---|---|\n" + rows
    )


def _globs(names: Any) -> str:
    return "<br>".join(f"`{name}`" for name in dict.fromkeys(names))


def _methods() -> str:
    rows = ""
    for name, kind in METHODS.items():
        unread = ", ".join(f"`{key}`" for key in OPTIONAL if key not in kind.reads)
        rows += f"| `{name}` | {unread} | `{json.dumps(kind.starts_from)}` |\n"
    return (
        "## Methods\n\nThe table shows what the block around a method starts from, and which objects it may not have. "
        "Keys that you give win.\n\n"
        "| `method` | has no use for | starts from |\n|---|---|---|\n" + rows
    )


def _presets() -> str:
    rows = "".join(f"| `{name}` | `{json.dumps(start)}` |\n" for name, start in PRESETS.items())
    text = '`"preset"` names what a block starts from; the keys beside it override it.'
    return f"## Presets\n\n{text}\n\n| `preset` | stands for |\n|---|---|\n{rows}"


def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _title(kind: Any, where: str) -> str:
    name = getattr(kind, "name", None)
    said = f'`"{where}"`' if name is None else f'`"{where}": "{name}"`'
    return f"{said} {{ #{_place(kind, where)} }}"


def _place(kind: Any, where: str) -> str:
    """Anchor of the keys of an object."""
    return f"{where}-{getattr(kind, 'name', '')}".strip(".-").replace(".", "-")


def _anchor(kind: Any, key: str, hint: Any) -> str:
    """A place to link to; an object has it at the heading of its keys."""
    own = getattr(kind, "name", "sparseforge") == "sparseforge"  # one place for each key: the default's
    return "" if dataclass_options(hint) or not own else f"<a id='{key}'></a>"


def _kind(hint: Any) -> str:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "<br>".join(f"`{json.dumps(option)}`" for option in options)
    if origin in (typing.Union, types.UnionType):
        if all(map(dataclasses.is_dataclass, options)):
            return "a name or an object"
        kinds = ("null" if option is type(None) else _kind(option) for option in options)
        return " or ".join(dict.fromkeys(kinds))
    if dataclasses.is_dataclass(hint):
        return "object"
    if origin is tuple:
        return "list of texts" if options[-1] is Ellipsis else "[number, number]"
    return _TYPES[hint]


def _linked(text: str) -> str:
    """Turn every mention of an equation or of a page of the site into a link."""
    text = re.sub(r"\bdocs/([\w/-]+)\.md", r"[\1](../\1.md)", text)
    return re.sub(r"(?:design )?(eqs?\. [\d,; -]*\d)", r"[\1](../concepts/equations.md)", text)
