"""Every method on fake CUDA tensors: no device mixing, nothing that NCCL would refuse, no wait beyond the allowed ones.

The runs are made in one process, which loads the no-op CUDA device before torch; pytest's own stays as it is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.fake_cuda import shim
from tests.distributed import PATIENCE, ROOT
from tests.fake_cuda.cases import ALLOWED, CASES, EXCEEDS, EXCHANGE, FAULTS, OFFLOADED, UPLOADS

pytestmark = pytest.mark.skipif(shim.missing_compiler() is not None, reason=str(shim.missing_compiler()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the record of every run, by its name."""
    output = tmp_path_factory.mktemp("fake_cuda") / "seen.json"
    process = subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda.worker", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if process.returncode:
        raise RuntimeError(f"the worker failed:\n{process.stderr[-4000:]}")
    runs: dict[str, Any] = json.loads(output.read_text())
    return runs


def too_many(run: dict[str, Any], offload: bool = False) -> list[str]:
    """Moments in which the host waited more often than it may, with the places."""
    excesses = []
    for moment in run["moments"]:
        kinds = [("syncs", OFFLOADED)] if offload else [("syncs", ALLOWED), ("uploads", UPLOADS)]
        for kind, limits in kinds:
            counted = {
                position: count for position, count in moment[kind].items() if not (offload and position == EXCHANGE)
            }
            count = sum(counted.values())
            limit = limits.get(moment["moment"])
            if limit is not None and count > limit:
                excesses.append(f"{moment['moment']}: {count} {kind}, {limit} allowed: {moment[kind]}")
    return excesses


@pytest.mark.parametrize("name", CASES)
def test_devices_do_not_mix_and_collectives_are_those_of_nccl(name: str, runs: dict[str, Any]) -> None:
    run = runs[name]
    assert run["error"] is None, run["error"]
    assert not run["faults"], sorted(set(run["faults"]))
    assert {"attach", "start"} < {moment["moment"] for moment in run["moments"]} or not CASES[name].steps


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=EXCEEDS[name], strict=True, raises=AssertionError))
        if name in EXCEEDS
        else name
        for name in CASES
    ],
)
def test_the_host_waits_as_often_as_it_may(name: str, runs: dict[str, Any]) -> None:
    if runs[name]["error"] is not None:
        pytest.skip("the run broke off, as its other test says")
    exceeded = too_many(runs[name], CASES[name].offload)
    assert not exceeded, "\n".join(exceeded)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("a CPU tensor into a CUDA operation", "device mixing: aten.mul_"),
        ("a CPU tensor into a collective", "allreduce of a cpu tensor"),
        ("bool", "allreduce of torch.bool"),
        ("not contiguous", "allreduce of a tensor that is not contiguous"),
    ],
)
def test_a_seeded_fault_is_found(fault: str, complaint: str, runs: dict[str, Any]) -> None:
    assert any(reported.startswith(complaint) for reported in runs[fault]["faults"]), runs[fault]


@pytest.mark.parametrize(("fault", "kind"), [("item", "syncs"), ("upload", "uploads")])
def test_a_seeded_wait_is_found(fault: str, kind: str, runs: dict[str, Any]) -> None:
    steps = [moment[kind] for moment in runs[fault]["moments"] if moment["moment"] == "ordinary"]
    assert any(steps) and too_many(runs[fault]), runs[fault]
    assert set(FAULTS[fault].block) == {
        "method",
        "importance",
    }  # the same run as a case that is clean, but for the fault
    assert not too_many(runs["naive_retrain"])


def test_the_training_loop_reads_a_step_behind_the_next_one(runs: dict[str, Any]) -> None:
    """Step 3 has an update and step 6 projects, which wait by themselves; the run ends with 7."""
    waits = runs["training loop"]
    assert not waits["faults"]
    ordinary = [step for number, step in enumerate(waits["steps"], 1) if number in (2, 4, 5)]
    assert ordinary == [{}] * 3, waits["steps"]
    assert not [caller for step in waits["steps"] for caller in step if caller.startswith("train/")]
    behind = [order for n in range(1, 7) for order in (f"step {n + 1}", f"read {n}", f"copy {n + 1}")]
    assert waits["order"] == ["step 1", "copy 1", *behind, "read 7"]


def test_a_packed_product_launches_the_kernel_of_its_rows_and_waits_for_nothing(runs: dict[str, Any]) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    packed = runs["packed products"]
    assert packed["error"] is None, packed["error"]
    outputs, inputs = packed["shape"]
    for launch in packed["launches"]:
        rows = launch["rows"]
        groups = inputs // 4
        parts = -(-outputs // launch["OUTPUTS"])
        assert launch["result"] == [launch["dtype"], [1, rows, outputs], "cuda:0", True]
        assert not launch["waits"] and not launch["faults"], launch
        if rows > 128:
            assert launch["kernel"] == "unpack" and launch["sizes"] == [outputs, groups]
            assert launch["grid"] == [parts, -(-groups // launch["GROUPS"])]
        elif rows > 4:
            assert launch["kernel"] == "many" and launch["HAS_BIAS"]
            assert launch["grid"] == [-(-rows // launch["ROWS"]), parts, 1]
            assert launch["sizes"] == [rows, outputs, groups, -(-groups // launch["GROUPS"]) * launch["GROUPS"]]
        else:
            assert launch["kernel"] == "few" and launch["HAS_BIAS"] and launch["ROWS"] >= rows
            assert launch["grid"] == [parts] and launch["sizes"] == [0, rows, outputs, groups]
    assert len(packed["launches"]) == 5 * 8


def test_packed_experts_are_one_launch_and_wait_for_nothing(runs: dict[str, Any]) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    outputs, inputs = runs["packed products"]["shape"]
    small, many = runs["packed products"]["experts"]
    for launch in (small, many):
        assert launch["result"] == ["torch.bfloat16", [launch["rows"], outputs], "cuda:0", True]
        assert launch["HAS_EXPERTS"] and not launch["HAS_BIAS"]
        assert not launch["waits"] and not launch["faults"], launch
    parts = {name: -(-outputs // launch["OUTPUTS"]) for name, launch in (("few", small), ("many", many))}
    assert small["kernel"] == "few" and small["grid"] == [parts["few"], small["rows"]]
    assert small["sizes"] == [small["experts"], 1, outputs, inputs // 4]
    programs = many["rows"] // many["ROWS"] + many["experts"]
    assert many["kernel"] == "many" and many["grid"] == [programs, parts["many"], 1]
    assert many["sizes"] == [many["rows"], outputs, inputs // 4, inputs // 4]


def test_a_packed_layer_is_one_call_of_a_traced_graph(runs: dict[str, Any]) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    outputs, inputs = runs["packed products"]["shape"]
    traced = runs["packed products"]["traced"]
    assert traced["calls"] == ["sparseforge.linear24.default", "sparseforge.linear24_input_gradient.default"]
    shapes = [[2, 3, outputs], [2, 3, inputs], [2, 3, outputs]]
    dtypes = ["torch.bfloat16", "torch.bfloat16", "torch.float16"]  # the last one under autocast
    assert traced["results"] == [[dtype, shape, "cuda:0"] for dtype, shape in zip(dtypes, shapes, strict=True)]
    assert not traced["waits"] and not traced["faults"]


def test_the_table_of_what_exceeds_is_not_stale() -> None:
    assert set(EXCEEDS) <= set(CASES)
