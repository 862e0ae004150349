"""One layout for each of DeepSpeed's optimizers, on the communicator that ZeRO itself uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sparseforge_ds.forge import SparseForge
from sparseforge_ds.ranks import AgreedError
from sparseforge_ds.zero import deepspeed_layouts
from tests.distributed import run_distributed
from tests.zero.case import MODELS, Case, build, build_engine, probe_of, train_step
from tests.zero.test_communication import COLLECTIVES, NOTHING_PERSISTENT

OWN: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
KINDS: dict[str, tuple[str, Case]] = {
    "inner": ("InnerLayout", Case(stage=0)),
    "unfused": ("Fp16UnfusedLayout", Case(stage=0, dtype="bf16")),
    "fused": ("Fp16Layout", Case(stage=0, dtype="bf16", more=OWN)),
    "bf16": ("Bf16Layout", Case(stage=1, dtype="bf16", more={"data_types": {"grad_accum_dtype": "fp32"}})),
    "stage 1": ("Zero12Layout", Case(stage=1)),
    "stage 2": ("Zero12Layout", Case(stage=2)),
    "stage 3": ("Zero3Layout", Case(stage=3, zero=NOTHING_PERSISTENT)),
    "stage 3, partitioned beforehand": ("Zero3Layout", Case(stage=3, zero=NOTHING_PERSISTENT)),
}
WITH_PROBES = {"curvature": {"source": "probe"}}


@contextmanager
def recorded_calls() -> Iterator[list[tuple[str, int, Any]]]:
    """Record (collective, bytes of its largest tensor, group) of every call, ours and DeepSpeed's alike."""
    from deepspeed.comm import comm

    calls: list[tuple[str, int, Any]] = []

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            sizes = [value.numel() * value.element_size() for value in arguments.values() if isinstance(value, Tensor)]
            calls.append((name, max(sizes, default=0), arguments.get("group") or dist.group.WORLD))
            return function(*args, **kwargs)

        return call

    # Replace the functions where they are looked up, and put them back.
    positions: list[tuple[Any, str]] = [(dist, name) for name in COLLECTIVES if hasattr(dist, name)]
    positions += [(comm.cdb, f"{name}_function") for name in ("all_gather", "reduce_scatter")]  # kept by DeepSpeed
    originals = [(position, name, getattr(position, name)) for position, name in positions]
    for position, name, function in originals:
        setattr(position, name, recording(name, function))
    try:
        yield calls
    finally:
        for position, name, function in originals:
            setattr(position, name, function)


def groups_of(name: str) -> list[str]:
    """List what is wrong with the kind and the groups of a layout."""
    import deepspeed

    kind, case = KINDS[name]
    case = Case(**{**case.__dict__, "config": WITH_PROBES})
    model = None
    if "beforehand" in name:
        model = MODELS[case.model]()
        deepspeed.zero.Init(module=model, config_dict_or_path=case.deepspeed())
    engine, forge = build(case, model)
    layout = forge.sharded.layout
    problems = [] if type(layout).__name__ == kind else [f"{name}: {type(layout).__name__}, not {kind}"]
    if (layout.rank, layout.world_size) != (dist.get_rank(), dist.get_world_size()):
        problems.append(f"{name}: rank {layout.rank} of {layout.world_size}")
    with recorded_calls() as reference:
        train_step(engine, case, 0)
        engine.optimizer.zero_grad()
    # The test's own mean of the loss is 4 bytes, and so are norms and overflow flags.
    used = {id(group) for _, size, group in reference if size > 64}
    if used != {id(layout.process_group)}:
        problems.append(f"{name}: DeepSpeed moves tensors over {len(used)} groups, or not over the layout's")
    assert not forge.step(probe_of(engine, case, 0))
    train_step(engine, case, 1)
    with recorded_calls() as ours:
        assert forge.step(probe_of(engine, case, 1))
        forge.histograms()
    if not ours or {id(group) for _, size, group in ours if size > 64} != {id(layout.process_group)}:
        problems.append(f"{name}: an update is not on the layout's group alone: {[(n, s) for n, s, _ in ours]}")
    return problems


def groups_of_all() -> list[str]:
    return [problem for name in KINDS for problem in groups_of(name)]


def test_every_optimizer_has_its_layout_and_all_tensors_move_on_one_communicator() -> None:
    assert run_distributed(groups_of_all, 2) == [[], []]


class Asynchronous:
    """DeepSpeed's accelerator, as of a device whose kernels are queued."""

    def __init__(self) -> None:
        self.waited = 0

    def is_synchronized_device(self) -> bool:
        return False

    def current_stream(self) -> Asynchronous:
        return self

    def synchronize(self) -> None:
        self.waited += 1


def waits(stage: int) -> list[int]:
    """Count how often the device was waited for in each step of a run with updates after every second one."""
    case = Case(stage=stage)
    engine, forge = build(case)
    device = Asynchronous()
    deepspeed_layouts.get_accelerator = lambda: device  # type: ignore[assignment]
    counts = []
    for step in range(4):
        before = device.waited
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))
        counts.append(device.waited - before)
    return counts


@pytest.mark.parametrize("stage", [2, 3])
def test_only_a_push_of_zero3_waits_for_the_device(stage: int) -> None:
    assert run_distributed(waits, 1, stage) == [[0, 1, 0, 1] if stage == 3 else [0, 0, 0, 0]]


def refused() -> str:
    engine = build_engine(Case(stage=1))
    engine.optimizer = object()
    with pytest.raises(ValueError) as error:
        deepspeed_layouts.layout_of(engine)
    return str(error.value)


def test_another_optimizer_is_refused_by_name() -> None:
    assert "DeepSpeed optimizer object has a layout that is not supported" in run_distributed(refused, 1)[0]


def damaged(stage: int, dtype: str) -> str:
    """Return why a model with one NaN is refused: its last element, which one rank has."""
    case = Case(stage=stage, dtype=dtype)
    model = MODELS[case.model]()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[-1, -1] = torch.nan
    with pytest.raises(AgreedError) as error:
        build(case, model)
    return str(error.value)


def another_layout() -> str:
    """Return the error where one rank's masters are not where they are expected."""
    engine = build_engine(Case(stage=1))
    if dist.get_rank() == 1:
        engine.optimizer.single_partition_of_fp32_groups[0].data[0] += 1
    with pytest.raises(RuntimeError) as error:
        SparseForge(engine, Case().sparseforge)
    return str(error.value)


def refused_by_check() -> list[str]:
    layouts = ((0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "bf16"))
    return [*(damaged(stage, dtype) for stage, dtype in layouts), another_layout()]


def test_all_ranks_name_a_damaged_weight_and_another_layout() -> None:
    for *messages, layout in run_distributed(refused_by_check, 2):
        assert len(messages) == 4
        for message in messages:
            assert "mlp.down_proj.weight holds infinity or NaN" in message and "model that was loaded" in message
        assert "on rank 1 are not where the shard map expects them" in layout
