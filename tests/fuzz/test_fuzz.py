"""Damaged inputs against every tool that reads them: one clear error or the right result, and never anything else.

SPARSEFORGE_FUZZ_CASES and SPARSEFORGE_FUZZ_SEED ask for more or others; `python -m tests.fuzz.campaign` for many.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz import campaign, worker
from tests.fuzz.cases import MUTATIONS, Case, kind_of, plan
from tests.fuzz.conftest import SUMMARY
from tests.fuzz.hostile_files import Payload
from tests.fuzz.inputs import write_inputs
from tests.fuzz.scene import Scene
from tests.fuzz.targets import TARGETS, Result

CASES = int(os.environ.get("SPARSEFORGE_FUZZ_CASES", "220"))
SEED = int(os.environ.get("SPARSEFORGE_FUZZ_SEED", "0"))


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good folders of real runs."""
    folder = tmp_path_factory.mktemp("fuzz") / "inputs"
    folder.mkdir()
    write_inputs(folder)
    return folder


def test_damaged_inputs_give_one_clear_error_or_a_correct_result(inputs: Path, request: pytest.FixtureRequest) -> None:
    outcomes = campaign.run_cases(plan(CASES, SEED), inputs)
    assert len(outcomes) == CASES
    request.config.stash[SUMMARY] = f"{campaign.counts(outcomes)}\n{campaign.table(outcomes)}"
    bad = [str(outcome) for outcome in outcomes if not outcome.good]
    assert not bad, "\n".join(bad)
    assert {outcome.case.mutation for outcome in outcomes} == set(MUTATIONS)
    counts = Counter(outcome.kind for outcome in outcomes)
    assert counts["refused"] > CASES / 3 and counts["same"] > 0 and counts["reported"] > 0


def test_the_plan_is_the_same_for_the_same_seed_and_leaves_nothing_out() -> None:
    assert plan(50, 3) == plan(300, 3)[:50] != plan(50, 4)
    cases = plan(1500, 0)
    assert {case.mutation for case in cases} == set(MUTATIONS)
    assert {kind_of(case.mutation) for case in cases} == {"damaged_files", "damaged_values", "hostile_files"}
    everything = {(subject, target) for subject, targets in TARGETS.items() for target in targets}
    assert {(case.subject, case.target) for case in cases} == everything


def scene(folder: Path, subject: str) -> Scene:
    (folder / subject).mkdir()
    (folder / subject / "file.json").write_text("{}")
    return Scene(folder / subject, random.Random(0), folder, subject, folder / "canary", {"file.json"})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("runs/file.json: is damaged"), "refused"),
        (ValueError("it is damaged"), "UNCLEAR"),
        (ValueError("file.json: is damaged\nsomewhere"), "UNCLEAR"),
        (ValueError("file.json: " + "x" * 600), "UNCLEAR"),
        (UnicodeDecodeError("utf-8", b"file.json", 0, 1, "file.json"), "CRASH"),
        (RuntimeError("file.json"), "CRASH"),
        (KeyError("file.json"), "CRASH"),
        (OSError("file.json"), "CRASH"),
        (MemoryError(), "MEMORY"),
    ],
)
def test_the_judge_knows_a_bad_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str
) -> None:
    def tool(*_: Path) -> Result:
        raise error

    monkeypatch.setitem(TARGETS, "run", {"tool": tool})
    case = Case(0, "run", "truncate", "tool", 0)
    good = {("run", "tool"): [Result("right")]}
    assert worker.judge(case, scene(tmp_path, "run"), tmp_path / "out", good)[0] == kind


@pytest.mark.parametrize(
    ("result", "kind"),
    [(Result("right"), "same"), (Result("wrong"), "WRONG"), (Result("wrong", accepted=False), "reported")],
)
def test_the_judge_knows_a_wrong_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: Result, kind: str
) -> None:
    monkeypatch.setitem(TARGETS, "run", {"tool": lambda *_: result})
    case = Case(0, "run", "truncate", "tool", 0)
    good = {("run", "tool"): [Result("right")]}
    assert worker.judge(case, scene(tmp_path, "run"), tmp_path / "out", good)[0] == kind


def test_what_a_tool_leaves_behind_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tool(folder: Path, out: Path, inputs: Path) -> Result:
        out.with_name(".out.tmp").mkdir()
        raise ValueError(f"{folder}: is damaged")

    (tmp_path / "inputs" / "run").mkdir(parents=True)
    (tmp_path / "inputs" / "run" / "sparseforge.json").write_text('{"a": 1}')
    (tmp_path / "scratch").mkdir()
    monkeypatch.setitem(TARGETS, "run", {"tool": tool})
    case = Case(0, "run", "truncate", "tool", 0)
    outcome = worker.run_case(case, tmp_path / "inputs", tmp_path / "scratch", {})
    assert outcome["kind"] == "LEFTOVER" and outcome["touched"] == "sparseforge.json"


def test_the_canary_sings_when_code_is_executed(tmp_path: Path) -> None:
    for way in range(7):
        canary = tmp_path / f"canary{way}"
        pickle.loads(pickle.dumps(Payload(canary, way)))
        assert canary.exists(), way
        shutil.rmtree(canary, ignore_errors=True)
