"""`sparseforge inspect`: the state of a run, and of its checkpoints on disk."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from sparseforge_ds.checkpoint.disk import measurements_text
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
"""Number of weights whose masks are shown one by one."""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge inspect`."""
    parser = commands.add_parser(
        "inspect",
        help="show step, phase, layout, coverage and masks of a run, and if its newest checkpoint is complete",
        description="Show the state of a run. Files are read without executing anything in them, masks one at a time.",
        epilog=_EPILOG,
    )
    parser.add_argument("run_folder", metavar="RUN", help="a run folder, its checkpoints, or one checkpoint")
    parser.add_argument("--quick", action="store_true", help="do not read the masks")
    parser.add_argument("--check", action="store_true", help="read all bytes of every checkpoint and compare checksums")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Inspect a run, print the result, and return 1 where the newest checkpoint is not intact."""
    with large_imports():
        from sparseforge_ds.export.inspection import inspect

    inspection = inspect(args.run_folder, args.quick, args.check)
    if args.json:
        print(measurements_text(inspection.to_dict(), indent=2))
    else:
        for label, text in _lines(inspection, args.check):
            print(f"{label:<12}{printable(text)}")
    return 0 if inspection.ok else 1


def _lines(inspection: Inspection, checked: bool) -> list[tuple[str, str]]:
    """Return (label, text) for every line of the report."""
    lines = [("path", str(inspection.path))]
    if inspection.status is not None:
        lines += _status(inspection.status, inspection.run or {})
    if inspection.result is not None:
        result = {key: inspection.result.get(key) for key in ("steps", "tokens", "seconds", "diverged")}
        lines.append(("result", ", ".join(f"{key} {value}" for key, value in result.items() if value is not None)))
    versions = (inspection.run or {}).get("versions")
    if isinstance(versions, dict):
        lines.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    lines += [("checkpoint", _entry(entry)) for entry in inspection.checkpoints]
    lines += [("leftover", f"{name}, of an interrupted save") for name in inspection.leftovers]
    lines += [("problem", problem) for problem in inspection.problems]
    lines.append(("complete", ("yes, all checksums agree" if checked else "yes") if inspection.ok else "NO"))
    return lines


def _status(status: RunStatus, run: dict[str, Any]) -> list[tuple[str, str]]:
    """Return lines for step, layout, coverage and masks of the newest checkpoint."""
    # Step and layout.
    max_steps = f" of {status.max_steps}" if status.max_steps is not None else ""
    phase = f", {status.phase}" if status.phase else ""
    hardening = "" if status.hardening is None else " (hardening {}-{})".format(*status.hardening)
    tokens = f", {status.tokens:,} tokens" if status.tokens is not None else ""
    ranks = f"{status.world_size} rank{'s' if status.world_size != 1 else ''}"
    lines = [
        ("step", f"{status.step}{max_steps}{phase}{hardening}{tokens}"),
        ("layout", f"{ranks}, ZeRO-{status.zero_stage}, {status.precision}"),
    ]
    if status.pattern is None:
        lines.append(("weights", f"{status.parameters:,} parameters; not saved by SparseForge, so without masks"))
        return lines
    # Coverage, of linear weights where the run has recorded them.
    coverage = run.get("coverage")
    linear = coverage.get("linear") if isinstance(coverage, dict) else None
    masked = status.masked_parameters
    total = max(1, status.parameters)
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
    """Return lines for all masks together, and for those that are the least decided."""
    from sparseforge_ds.export.inspection import UNDECIDED, summarize_masks

    total = summarize_masks(status.masks)
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
    """Return words for the share of a mask that keeps the largest weights; empty where it is not known."""
    return "" if (share := mask.magnitude_agreement) is None else f", agrees with the largest |W| in {share:.2%}"


def _entry(entry: SavedCheckpoint) -> str:
    """Return a line for one saved checkpoint."""
    step = "?" if entry.step is None else str(entry.step)
    state = "complete" if entry.complete else "DAMAGED" if entry.damaged else "INCOMPLETE"
    return f"{entry.name}  step {step}  {entry.bytes / 1e6:,.1f} MB  {state}"
