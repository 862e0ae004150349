"""A process that runs cases, one after the other, so that a crash, a hang or a flood of memory ends only itself.

    python -m tests.fuzz.worker INPUTS CASES.json OUTCOMES.jsonl

Writes a line before and a line after every case. Address space is limited, and every case has a time limit.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.cases import MUTATIONS, Case, target_of
from tests.fuzz.scene import NotApplicable, Scene
from tests.fuzz.targets import Result

SECONDS = 15
"""After which a tool hangs."""
ADDRESS_SPACE = 3 << 30
"""Bytes that a process may map beyond those mapped before its first case."""
RESIDENT = 256 << 20
"""Bytes by which the peak memory may grow in one case: the largest bomb, unpacked a few times."""
LONGEST_MESSAGE = 600


class Hang(BaseException):
    """A tool took too long."""


def run_case(case: Case, inputs: Path, scratch: Path, good: dict[tuple[str, str], list[Result]]) -> dict[str, str]:
    """Run one case and return its kind (refused, reported, same, or a failure of the tool) and the message."""
    folder = scratch / case.subject
    canary = scratch / "canary"
    outs = scratch / "outs"
    outs.mkdir()
    scene = Scene(folder, random.Random(case.seed), inputs, case.subject, canary)
    _damage(scene, case.mutation)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kind, message = judge(case, scene, outs / "out", good)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    left = sorted(path.name for path in outs.iterdir())
    if canary.exists():
        kind = "EXECUTED"
        message = f"the canary exists; {message}"
    elif grown > RESIDENT:
        kind = "MEMORY"
        message = f"the peak grew by {grown >> 20} MiB; {message}"
    elif left and (left != ["out"] or kind == "refused"):
        kind = "LEFTOVER"
        message = f"{left} left behind; {message}"
    return {"kind": kind, "message": message, "touched": ", ".join(sorted(scene.touched))}


def _damage(scene: Scene, name: str) -> None:
    """Apply a mutation; one that has nothing to damage in this choice of file gets other choices."""
    for _ in range(50):
        shutil.copytree(scene.inputs / scene.subject, scene.folder)
        try:
            MUTATIONS[name](scene)
        except NotApplicable:
            scene.touched.clear()
            scene.unlisted = False
            shutil.rmtree(scene.folder)
            continue
        return
    raise NotApplicable(f"{name} on {scene.subject}")


def judge(case: Case, scene: Scene, out: Path, good: dict[tuple[str, str], list[Result]]) -> tuple[str, str]:
    try:
        with _limit(SECONDS):
            result = target_of(case)(scene.folder, out, scene.inputs)
    except ValueError as error:
        return _judge_message(error, scene)
    except Hang:
        return "HANG", f"more than {SECONDS} s"
    except MemoryError as error:
        return "MEMORY", repr(error)
    except Exception as error:  # noqa: BLE001 (whatever else comes out of a tool is what is looked for)
        where = _where(error)
        return "CRASH", f"{type(error).__name__}: {str(error)[:300]} ({where})"
    if not result.accepted:
        return "reported", ""
    accepted = good[case.subject, case.target]
    allowed = accepted[1:] if "step_000006" in scene.touched else accepted[:1]
    same = result in allowed or (scene.unlisted and result.model in [other.model for other in allowed])
    return ("same", "") if same else ("WRONG", "accepted, and not what the good folder gives")


def _judge_message(error: ValueError, scene: Scene) -> tuple[str, str]:
    text = str(error)
    named = {scene.folder.name, *scene.touched}
    if type(error).__name__ not in ("ValueError", "AgreedError"):
        return "CRASH", f"{type(error).__name__}: {text[:300]} ({_where(error)})"
    if "\n" in text or len(text) >= LONGEST_MESSAGE:
        return "UNCLEAR", f"{len(text)} characters in {text.count(chr(10)) + 1} lines: {text[:300]}"
    if not any(name in text for name in named):
        return "UNCLEAR", f"names neither file nor folder: {text} ({_where(error)})"
    return "refused", text


def _where(error: BaseException) -> str:
    traceback = error.__traceback__
    result = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if "sparseforge_ds" in code.co_filename:
            result = f"{Path(code.co_filename).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return result


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def good_results(cases: list[Case], inputs: Path, scratch: Path) -> dict[tuple[str, str], list[Result]]:
    """Return the results of each tool on each undamaged folder: its newest checkpoint, and the one before."""
    good: dict[tuple[str, str], list[Result]] = {}
    for case in cases:
        if (case.subject, case.target) in good:
            continue
        results = []
        for removed in (None, "step_000006"):
            folder = scratch / case.subject
            shutil.copytree(inputs / case.subject, folder)
            if removed is not None:
                shutil.rmtree(folder / "checkpoints" / removed, ignore_errors=True)
            results.append(target_of(case)(folder, scratch / "out", inputs))
            shutil.rmtree(scratch)
            scratch.mkdir()
        assert all(result.accepted for result in results), f"{case.subject} is not good to begin with"
        good[case.subject, case.target] = results
    return good


def main(inputs: Path, cases_file: Path, outcomes: Path) -> None:
    """Run all cases of a file."""
    warnings.simplefilter("ignore")
    cases = [Case(**case) for case in json.loads(cases_file.read_text())]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name, open(outcomes, "a", buffering=1) as lines:
        scratch = Path(name) / "case"
        scratch.mkdir()
        good = good_results(cases, inputs, scratch)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, resource.RLIM_INFINITY))
        for case in cases:
            _say(lines, {"start": case.number})
            shutil.rmtree(scratch)
            scratch.mkdir()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                outcome: dict[str, Any] = run_case(case, inputs, scratch, good)
            _say(lines, {"number": case.number, **outcome})


def _say(lines: Any, content: dict[str, Any]) -> None:
    lines.write(json.dumps(content) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
