#!/usr/bin/env python3
"""Quality and cost of curvature estimates, against a near-exact diagonal and as one-shot masks.

python benchmarks/curvature.py FOLDER --model stories260K --text train.jsonl --heldout heldout.jsonl

The reference is Hutchinson's estimate at the weights by exact Hessian-vector products, of as many probes as
--reference_probes says, in two halves whose agreement is its reliability. Every estimate is averaged over refreshes of
one probe, each on another batch, and judged after 1 and after more of them, by its elements, shrunk to the product of
its row and column sums, and by that product. FOLDER gets curvature.json and curvature.md. It keeps all measurements,
and the same command continues an interrupted benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.curvature_estimates import ESTIMATES, Estimate, Exact, OneRank, Own, be_one_rank, exact_samples, rounds
from benchmarks.curvature_quality import Diagonal, Judge, factored, rank_correlation, shrunk
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.data.tokenization import tokenize
from sparseforge_ds.evaluate.finished_model import load_model, load_tokenizer
from sparseforge_ds.evaluate.scored_text import read_documents
from sparseforge_ds.model.families import PrunableWeight, prunable_weights

EMA_DECAY = 0.9
SAVE_EVERY = 20
"""Probes of the reference between two saves."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Estimates of the curvature against a near-exact one")
    parser.add_argument("folder", type=Path, help="takes the results; goes on where an earlier call stopped")
    parser.add_argument("--model", required=True, help="folder or hub id of a small model; all of it is held in fp32")
    parser.add_argument("--text", required=True, help=".txt or .jsonl file that curvature is measured on")
    parser.add_argument("--heldout", required=True, help=".txt or .jsonl file for the loss of one-shot masks")
    parser.add_argument("--seq", type=int, default=256, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=8, help="windows of a probe")
    parser.add_argument("--batches", type=int, default=8, help="batches that refreshes go round")
    parser.add_argument("--heldout_windows", type=int, default=64)
    parser.add_argument("--reference_probes", type=int, default=1000)
    parser.add_argument("--refreshes", type=int, default=32, help="of every estimate; judged after 1, 8 and these")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of the names of estimates to measure")
    arguments = parser.parse_args(argv)
    for name in ("seq", "batch", "batches", "heldout_windows", "refreshes"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: use an integer >= 1")
    if arguments.reference_probes < 2:
        parser.error(f"--reference_probes {arguments.reference_probes}: use an integer >= 2, for two halves")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing, then write both files."""
    arguments = parse_arguments(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    settings = _settings(arguments)
    kept = arguments.folder / "settings.json"
    if kept.exists() and json.loads(kept.read_text()) != settings:
        raise ValueError(f"{kept}: measured with other settings; use another folder")
    _write(kept, json.dumps(settings, indent=2))

    batches = list(windows(arguments.text, arguments, arguments.batch * arguments.batches).split(arguments.batch))
    model = load_model(arguments.model, "float32")
    model.config._attn_implementation = "eager"  # has a double backward
    weights = prunable_weights(model, SparseForgeConfig())
    judge = Judge(model, weights, windows(arguments.heldout, arguments, arguments.heldout_windows), arguments.batch)
    halves = reference(model, weights, batches, arguments)
    judge.reference = {name: (halves[0][name] + halves[1][name]) / 2 for name in halves[0]}

    be_one_rank()
    engines: dict[str, OneRank] = {}
    rows_file = arguments.folder / "rows.jsonl"
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
    chosen = [e for e in ESTIMATES if not arguments.only or any(e.name.startswith(begin) for begin in arguments.only)]
    missing = [estimate for estimate in chosen if estimate.name not in {row["estimate"] for row in rows}]
    for estimate in tqdm(missing, desc="estimates", disable=None):
        result = measure(estimate, judge, batches, engines, arguments)
        # All rows of an estimate in one write of the whole file: an estimate is measured or not.
        rows += result
        _write(rows_file, "".join(json.dumps(row) + "\n" for row in rows))

    names = [weight.name for weight in weights]
    report = {
        "settings": settings,
        "dense_perplexity": judge.perplexity(),
        "reference": {
            "probes": arguments.reference_probes,
            "agreement_of_halves": rank_correlation(*(judge.groups(half) for half in halves)),
            **asdict(judge.judge(judge.reference)),
        },
        "reference_factored": asdict(judge.judge(factored(judge.reference, weights))),
        "magnitude": asdict(judge.judge({name: torch.ones_like(judge.reference[name]) for name in names})),
        "rows": rows,
    }
    _write(arguments.folder / "curvature.json", json.dumps(report, indent=2))
    table = markdown(report)
    _write(arguments.folder / "curvature.md", table)
    print(table)
    return 0


def windows(text: str, arguments: argparse.Namespace, count: int) -> Tensor:
    """(count, seq) token ids: documents end to end, framed as for training.

    Raises:
        ValueError: there is too little text.
    """
    tokenizer = load_tokenizer(arguments.model)
    needed = count * arguments.seq
    ids = []
    for document in read_documents(text):
        ids += tokenize([document], tokenizer)[0]
        if len(ids) >= needed:
            return torch.tensor(ids[:needed]).view(count, arguments.seq)
    raise ValueError(f"{text}: has {len(ids)} tokens, {needed} are needed; use a longer text, or smaller --batches")


def reference(
    model: Any, weights: list[PrunableWeight], batches: list[Tensor], arguments: argparse.Namespace
) -> list[Diagonal]:
    """Means of the even and of the odd probes; kept in the folder as they grow."""
    file = arguments.folder / "reference.pt"
    done = 0
    sums = [{weight.name: torch.zeros(weight.numel, dtype=torch.float64) for weight in weights} for _ in range(2)]
    if file.exists():
        saved = torch.load(file, weights_only=True)
        done, sums = saved["probes"], saved["sums"]
    # Two probes in a row share a batch, so that both halves see all of them.
    twice = [batch for batch in batches for _ in range(2)]
    todo = range(done, arguments.reference_probes)
    samples = exact_samples(model, weights, twice, seed=1, first=done)
    for probe in tqdm(todo, desc="reference", disable=None):
        sample, _ = next(samples)
        for name, value in sample.items():
            sums[probe % 2][name] += value
        if (probe + 1) % SAVE_EVERY == 0 or probe + 1 == arguments.reference_probes:
            passing = file.with_suffix(".passing")
            torch.save({"probes": probe + 1, "sums": sums}, passing)
            os.replace(passing, file)
    counts = [-(-arguments.reference_probes // 2), arguments.reference_probes // 2]
    return [
        {name: (value / count).float() for name, value in half.items()}
        for half, count in zip(sums, counts, strict=True)
    ]


def measure(
    estimate: Estimate,
    judge: Judge,
    batches: list[Tensor],
    engines: dict[str, OneRank],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Rows of one estimate: after 1, 8 and all refreshes their mean, and after all their running mean.

    One that probes part of the weights at a time is judged where all have had their turn.
    """
    dtype = estimate.dtype if isinstance(estimate, Own) else "float32"
    if dtype not in engines:
        engines.clear()  # one at a time
        engines[dtype] = OneRank(load_model(arguments.model, dtype), dtype, arguments.batch)
    engine = engines[dtype]
    last = arguments.refreshes
    counts = {1, 8, last}
    if isinstance(estimate, Exact):
        turns = rounds(judge.weights, estimate.restricted_to)
        last = -(-last // turns) * turns
        counts = counts | {last} if turns == 1 else {last}
        samples = exact_samples(judge.model, judge.weights, batches, estimate.restricted_to)
    else:
        samples = engine.samples(estimate, batches)
    step = engine.step_seconds(batches[0], 3)
    mean: Diagonal = {}
    running: Diagonal = {}
    times: list[float] = []
    rows = []
    for number in range(1, last + 1):
        sample, seconds = next(samples)
        times.append(seconds)
        for name, value in sample.items():
            mean[name] = value if number == 1 else mean[name] + (value - mean[name]) / number
            running[name] = running.get(name, torch.zeros_like(value)).lerp(value, 1 - EMA_DECAY)
        judged = {"mean": mean} if number in counts else {}
        if number == last > 1 and 1 in counts:
            judged["running mean"] = running
        for average, diagonal in judged.items():
            for form, of in (("elements", None), ("shrunk", shrunk), ("factored", factored)):
                if form == "elements" and estimate.name.startswith(("outputs", "wanda")):
                    continue  # only sums are measured
                if form == "shrunk" and not estimate.name.startswith("weights"):
                    continue
                quality = judge.judge(diagonal if of is None else of(diagonal, judge.weights))
                row = {"estimate": estimate.name, "refreshes": number, "average": average, "form": form}
                rows.append({**row, **asdict(quality)})
    cost = sorted(times)[len(times) // 2]
    return [{**row, "refresh_s": cost, "training_step_s": step, "cost_in_steps": cost / step} for row in rows]


def markdown(report: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    known = report["reference"]
    lines = [
        f"Dense: perplexity {report['dense_perplexity']:.3f}. Reference: {known['probes']} exact probes of the "
        f"weights, in halves that correlate at {known['agreement_of_halves']:.3f} inside groups. The last column is "
        "what a refresh costs in training steps on one micro-batch of its size.",
        "",
        "| estimate | refreshes | averaged | form | rank correlation | same survivors | one-shot perplexity | steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    fixed = {"reference": "reference, elements", "reference_factored": "reference, factored", "magnitude": "magnitude"}
    for key, name in fixed.items():
        lines.append(f"| {name} | | | | {_numbers(report[key])} | |")
    for row in report["rows"]:
        lines.append(
            f"| {row['estimate']} | {row['refreshes']} | {row['average']} | {row['form']} | {_numbers(row)} "
            f"| {row['cost_in_steps']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _numbers(row: dict[str, Any]) -> str:
    return f"{row['correlation']:.3f} | {row['same_survivors']:.3f} | {row['perplexity']:.2f}"


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that results depend on."""
    return {name: value for name, value in vars(arguments).items() if name not in ("folder", "only")}


def _write(file: Path, text: str) -> None:
    passing = file.with_name(file.name + ".passing")
    passing.write_text(text)
    os.replace(passing, file)


if __name__ == "__main__":
    sys.exit(main())
