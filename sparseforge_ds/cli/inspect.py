"""`sparseforge inspect`: where a run stands, and whether what is on disk can be relied on."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from sparseforge_ds.cli.imports import large_imports
from sparseforge_ds.cli.printing import printable
from sparseforge_ds.model.coverage import describe_share, percent

if TYPE_CHECKING:
    from sparseforge_ds.checkpoint.inventory import SavedCheckpoint
    from sparseforge_ds.export.inspection import Inspection, MaskReport, RunStatus

_EPILOG = """\
exit code: 0 all in order; 1 the newest checkpoint (by --check: any) is incomplete or damaged, or missing; 2 an error

example:
  sparseforge inspect runs/qwen3_14b
"""
_WORST = 5
"""Weights whose masks are shown one by one."""


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="step, phase, layout, coverage and masks of a run, and whether its newest checkpoint is complete",
        description="Say where a run stands. Files are read without executing anything in them, masks one at a time.",
        epilog=_EPILOG,
    )
    parser.add_argument("run_folder", metavar="RUN", help="a run folder, its checkpoints, or one checkpoint")
    parser.add_argument("--quick", action="store_true", help="do not read the masks")
    parser.add_argument("--check", action="store_true", help="read all bytes of every checkpoint and compare checksums")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, print, and say it in the exit code."""
    with large_imports():
        from sparseforge_ds.export.inspection import inspect

    found = inspect(args.run_folder, args.quick, args.check)
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        for label, text in _lines(found, args.check):
            print(f"{label:<12}{printable(text)}")
    return 0 if found.ok else 1


def _lines(found: Inspection, checked: bool) -> list[tuple[str, str]]:
    lines = [("path", str(found.path))]
    if found.status is not None:
        lines += _status(found.status, found.run or {})
    if found.result is not None:
        shown = {key: found.result.get(key) for key in ("steps", "tokens", "seconds", "diverged")}
        lines.append(("result", ", ".join(f"{key} {value}" for key, value in shown.items() if value is not None)))
    versions = (found.run or {}).get("versions")
    if isinstance(versions, dict):
        lines.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    lines += [("checkpoint", _entry(entry)) for entry in found.checkpoints]
    lines += [("leftover", f"{name}, of an interrupted save") for name in found.leftovers]
    lines += [("problem", problem) for problem in found.problems]
    lines.append(("complete", ("yes, all checksums agree" if checked else "yes") if found.ok else "NO"))
    return lines


def _status(status: RunStatus, run: dict[str, Any]) -> list[tuple[str, str]]:
    of = f" of {status.max_steps}" if status.max_steps is not None else ""
    phase = f", {status.phase}" if status.phase else ""
    window = "" if status.hardening is None else " (hardening {}-{})".format(*status.hardening)
    seen = f", {status.tokens:,} tokens" if status.tokens is not None else ""
    ranks = f"{status.world_size} rank{'s' if status.world_size != 1 else ''}"
    lines = [
        ("step", f"{status.step}{of}{phase}{window}{seen}"),
        ("layout", f"{ranks}, ZeRO-{status.zero_stage}, {status.precision}"),
    ]
    if status.pattern is None:
        lines.append(("weights", f"{status.parameters:,} parameters; not saved by SparseForge, so without masks"))
        return lines
    coverage = run.get("coverage")
    linear = coverage.get("linear") if isinstance(coverage, dict) else None
    masked, total = status.masked_parameters, max(1, status.parameters)
    if type(linear) is int and linear >= masked and linear > 0:
        share = describe_share(masked, linear, total)
    else:
        share = f"{percent(masked, total)} of all parameters under a mask"
    lines.append(("coverage", f"{status.pattern} in {status.masked_weights} weights: {share} ({total:,} in all)"))
    if branch := status.branch_parameters:
        lines.append(
            ("branches", f"{branch:,} numbers in low-rank branches, {branch / masked:.4f} of the dense weights'")
        )
    return lines + (_masks(status) if status.masks else [])


def _masks(status: RunStatus) -> list[tuple[str, str]]:
    from sparseforge_ds.export.inspection import UNDECIDED, summarize

    total = summarize(status.masks)
    low, high = UNDECIDED
    lines = [
        ("mask", f"{total.binary:.2%} exactly 0 or 1, {total.undecided:.2%} undecided ({low} to {high})"),
        ("", f"hard mask: density {total.density:.2%}{_agreement(total)}"),
    ]
    worst = [mask for mask in status.masks if mask.undecided or mask.strange][:_WORST]
    for mask in worst:
        lines.append(
            (
                "",
                f"  {mask.name}: {mask.undecided:.2%} undecided, {mask.binary:.2%} exact, "
                f"density {mask.density:.2%}{_agreement(mask)}",
            )
        )
    return lines


def _agreement(mask: MaskReport) -> str:
    return "" if (share := mask.magnitude_agreement) is None else f", agrees with the largest |W| in {share:.2%}"


def _entry(entry: SavedCheckpoint) -> str:
    step = "?" if entry.step is None else str(entry.step)
    state = "complete" if entry.complete else "DAMAGED" if entry.damaged else "INCOMPLETE"
    return f"{entry.name}  step {step}  {entry.bytes / 1e6:,.1f} MB  {state}"
