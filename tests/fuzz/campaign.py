"""Many cases in a few processes, and the counts of what came of them.

python -m tests.fuzz.campaign --cases 2000 [--seed 1] [--inputs FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.distributed import ROOT
from tests.fuzz.cases import Case, kind_of, plan
from tests.fuzz.inputs import write_inputs

GOOD = ("refused", "reported", "same")
"""Refused with one clear error; reported as not in order by a tool that reports; the right result all the same."""
SILENCE = 60
"""Seconds without a word from a worker after which it is dead."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case."""

    case: Case
    kind: str
    message: str
    touched: str = ""

    @property
    def good(self) -> bool:
        """Return True for one clear error, or a correct result."""
        return self.kind in GOOD

    def __str__(self) -> str:
        case = self.case
        head = f"#{case.number} {case.target}({case.subject}) after {case.mutation} of {self.touched or '?'}"
        return f"{head}: {self.kind} {self.message}"


def run_cases(cases: list[Case], inputs: Path, processes: int = 2) -> list[Outcome]:
    """Run every case in one of `processes` workers; a worker that dies is replaced, and its case is a crash."""
    results: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        workers = [_Worker(Path(name) / str(i), cases[i::processes], inputs) for i in range(processes)]
        while workers:
            time.sleep(0.1)
            for worker in list(workers):
                if worker.poll():
                    workers.remove(worker)
                    results += worker.outcomes
    return sorted(results, key=lambda outcome: outcome.case.number)


class _Worker:
    """A process and the cases that it still has to run."""

    def __init__(self, folder: Path, cases: list[Case], inputs: Path) -> None:
        self.folder = folder
        self.inputs = inputs
        self.left = {case.number: case for case in cases}
        self.outcomes: list[Outcome] = []
        self.starts = 0
        folder.mkdir()
        self._start()

    def poll(self) -> bool:
        """Return whether all is done."""
        if self.process.poll() is None:
            if time.time() - self._heard() < SILENCE:
                return False
            self.process.kill()
            self.process.wait()
        started = self._read()
        if not self.left:
            return True
        if started is None or self.process.returncode > 0:
            raise RuntimeError(f"the fuzzer itself failed: {(self.folder / 'log').read_text()[-3000:]}")
        signal = -(self.process.returncode or 0)
        self.outcomes.append(Outcome(self.left.pop(started), "DIED", f"the process ended by signal {signal}"))
        if self.left:
            self._start()
        return not self.left

    def _start(self) -> None:
        self.starts += 1
        cases = self.folder / "cases.json"
        self.lines = self.folder / f"{self.starts}.jsonl"
        cases.write_text(json.dumps([asdict(case) for case in self.left.values()]))
        with open(self.folder / "log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.worker", str(self.inputs), str(cases), str(self.lines)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.began = time.time()

    def _heard(self) -> float:
        return max(self.began, self.lines.stat().st_mtime if self.lines.exists() else 0.0)

    def _read(self) -> int | None:
        """Take over what was written; the case that was begun and not ended, if there is one."""
        started = None
        for line in self.lines.read_text().splitlines() if self.lines.exists() else []:
            content = json.loads(line)
            if "start" in content:
                started = content["start"]
            else:
                case = self.left.pop(content["number"])
                self.outcomes.append(Outcome(case, content["kind"], content["message"], content["touched"]))
                started = None
        return started


def counts(outcomes: Iterable[Outcome]) -> str:
    """Return one line: how many of each kind."""
    totals = Counter(outcome.kind for outcome in outcomes)
    order = [*GOOD, *sorted(set(totals) - set(GOOD))]
    return f"{sum(totals.values())} damaged inputs: " + ", ".join(f"{totals[kind]} {kind}" for kind in order)


def table(outcomes: Iterable[Outcome]) -> str:
    """Lines: kinds of outcome by kind of damage and by tool."""
    rows: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for row in (f"damage: {kind_of(outcome.case.mutation)}", f"tool: {outcome.case.target}"):
            rows.setdefault(row, Counter())[outcome.kind] += 1
    shown = {row: ", ".join(f"{n} {kind}" for kind, n in sorted(rows[row].items())) for row in sorted(rows)}
    return "\n".join(f"  {row:<24}{text}" for row, text in shown.items())


def _main() -> int:
    parser = argparse.ArgumentParser(description="Run the fuzzer at any scale.")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=Path, help="folder of good inputs, made when it is not there")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-inputs-") as name:
        inputs = args.inputs or Path(name) / "inputs"
        if not inputs.is_dir():
            inputs.mkdir()
            write_inputs(inputs)
        began = time.time()
        cases = [case for case in plan(args.cases, args.seed) if not args.only or case.number in args.only]
        outcomes = run_cases(cases, inputs)
    for outcome in outcomes:
        if args.only or not outcome.good:
            print(outcome)
    print(counts(outcomes), f"in {time.time() - began:.0f} s")
    print(table(outcomes))
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(_main())
