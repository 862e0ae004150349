"""`sparseforge verify`: a check that every group of every prunable weight is in its pattern."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from sparseforge_ds.cli.given_model import require_model
from sparseforge_ds.cli.imports import large_imports
from sparseforge_ds.cli.printing import printable, require_json_file, write_report

if TYPE_CHECKING:
    from sparseforge_ds.export.verification import FolderReport

_EPILOG = """\
A folder of consolidate or export has a sparsity.json with the pattern of each weight. In any other folder every
prunable weight but those of --exclude must be in --pattern, by default 2:4; of an unknown family these are all
matrices of numbered layers, along their last axis. Weights that llm-compressor quantized (compressed-tensors) are
checked as their kernels see them, so that the check shows if the quantization kept the zeros.

exit code: 0 all in order; 1 a violation; 2 the folder cannot be read

examples:
  sparseforge verify models/qwen3_14b_2to4 --json report.json
  sparseforge verify models/from_elsewhere --pattern 4:8
  sparseforge verify models/qwen3_14b_2to4-W8A8 --pattern 2:4   # what a quantization left of it
"""


EXCLUDE = "weights that are dense, as prune's --exclude left them, in a folder without sparsity.json"


def register(commands: Any) -> None:
    """Add the parser of `sparseforge verify`."""
    parser = commands.add_parser(
        "verify",
        help="check every group of every prunable weight of a model folder",
        description="Read the weights of a Hugging Face folder and count: groups out of pattern, -0.0, values that "
        "are not finite, missing weights, bytes that are not the exported ones.",
        epilog=_EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder with safetensors")
    parser.add_argument("--pattern", help="like 4:8 (default: what sparsity.json says, or 2:4)")
    parser.add_argument("--exclude", nargs="+", default=[], metavar="GLOB", help=EXCLUDE)
    parser.add_argument("--json", metavar="FILE", help="also write the report to a file")
    parser.add_argument("--workers", type=int, help="threads (default: one per processor, at most 8)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check a folder, print a table, and return 1 for a violation."""
    require_model(args.model, hub=False)
    require_json_file(args.json, [args.model])
    with large_imports():
        from sparseforge_ds.export.unused import describe_unused
        from sparseforge_ds.export.verification import check_folder
        from sparseforge_ds.export.workers import require_workers
        from sparseforge_ds.mask.pattern import parse_pattern, require_removing

    require_workers(args.workers)
    pattern = None if args.pattern is None else require_removing(parse_pattern(args.pattern))
    report = check_folder(args.model, pattern, args.workers, args.exclude)
    _print_table(report)
    if report.unused:
        print(printable(describe_unused(args.model, report.unused)))
    print("OK" if report.ok else "NOT OK")
    if args.json is not None:
        write_report(args.json, report.to_dict())
    return 0 if report.ok else 1


def _print_table(report: FolderReport) -> None:
    """Print a row for every weight, totals, and everything odd about the folder."""
    from sparseforge_ds.export.model_folder import describe_values

    # A row for every weight.
    names = [printable(row.name) for row in report.rows]
    width = max(map(len, names), default=6)
    print(f"{'weight':<{width}}  {'shape':>16}  {'groups':>12}  {'non-zeros':>14}  {'violations':>10}")
    for name, row in zip(names, report.rows, strict=True):
        shape = " x ".join(map(str, row.shape))
        notes = f"  {row.negative_zeros} x -0.0" if row.negative_zeros else ""
        notes += f"  {row.nonfinite} not finite" if row.nonfinite else ""
        print(f"{name:<{width}}  {shape:>16}  {row.groups:>12,}  {row.nonzeros:>14,}  {row.violations:>10,}{notes}")
    # Totals.
    total = report.to_dict()
    share = 100 * total["nonzeros"] / max(1, total["elements"])
    print(
        f"{report.pattern}: {total['weights']} weights, {total['groups']:,} groups, {total['nonzeros']:,} non-zeros "
        f"({share:.2f}% of these weights), {total['violations']:,} violations"
    )
    if report.exclude:
        print(f"not checked, as --exclude says: {', '.join(report.exclude)}")
    print(f"size: {report.size}")
    if report.values is not None:
        print(printable(describe_values(report.values, report.errors)))
    if report.quantized:
        verdict = "kept every group" if not report.violations else "did not keep the pattern"
        print(f"{report.quantized} of the folder's weights are quantized: the quantization {verdict}")
    # Tensors that are missing or changed, and notes.
    for kind, entries in (
        ("missing", report.missing),
        ("not the exported bytes", report.changed),
        ("note", report.notes),
    ):
        for entry in entries:
            print(f"{kind}: {printable(entry)}")
