"""The reference of the command line, written from the parsers themselves."""

from __future__ import annotations

import argparse

from sparseforge_ds.cli.main import parser as all_commands
from sparseforge_ds.config.command_line import argument_parser

_INTRODUCTION = """\
# Command line

*Written from the parsers.* `sparseforge` is installed with the package; `python -m sparseforge_ds` is the same. An
error is one line that names the thing, its value and the cure.

Where to go on: [the keys of the JSON](configuration.md), [guides](../guides/index.md), [every message](messages.md).
"""


def command_page() -> str:
    """The whole page: the trainer and the other subcommands."""
    top = all_commands()
    (choices,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    parsers = {f"sparseforge {name}": sub for name, sub in choices.choices.items()}
    parsers["sparseforge train"] = argument_parser()
    told = {f"sparseforge {action.dest}": action.help or "" for action in choices._choices_actions}
    listed = "".join(f"| [`{name}`](#{_anchor(name)}) | {_cell(told.get(name, ''))} |\n" for name in parsers)
    sections = [_section(name, parser) for name, parser in parsers.items()]
    return f"{_INTRODUCTION}\n| command | |\n|---|---|\n{listed}\n" + "\n".join(sections)


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        rows.append(f"| {_names(action)} | {_cell(_help(action, parser))} |\n")
    epilog = f"\n```text\n{parser.epilog.strip()}\n```\n" if parser.epilog else ""
    head = f"## `{name}` {{ #{_anchor(name)} }}\n\n{_cell(parser.description or '')}\n"
    return f"{head}\n| flag | meaning |\n|---|---|\n{''.join(rows)}{epilog}"


def _names(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    spellings = [name for name in action.option_strings if "_" in name or "-" not in name[2:]]
    value = ""
    if action.nargs != 0 and action.const is not True:
        shown = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest)
        value = (
            f" {shown if isinstance(shown, str) else ' '.join(shown)}".upper() if not action.choices else f" {shown}"
        )
    return ", ".join(f"`{name}{value}`" for name in spellings)


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    silent = action.default in (None, argparse.SUPPRESS, []) or action.default is False or action.required
    if silent or "default" in text:
        return text
    return f"{text} (default: {action.default})"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _anchor(name: str) -> str:
    return name.replace(" ", "-").replace(".", "-").lower()
