"""The launcher's training loop on fake CUDA tensors: what the host waits for in each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparseforge_ds as sf
from benchmarks.fake_cuda.counting import Counter
from benchmarks.fake_cuda.engine import CUDA, Rank, attach, model_of, process_group
from sparseforge_ds.data.micro_batch import BatchLayout, MicroBatch
from sparseforge_ds.train import loop, step_log
from sparseforge_ds.train.monitoring import Monitor
from sparseforge_ds.train.objective import LOSSES
from sparseforge_ds.train.schedule import LearningRate
from tests.zero.case import MODELS

STEPS = 7
BLOCK: dict[str, Any] = {"max_steps": STEPS, "method": {"update_every": 3, "hardening": [0.0, 0.8]}}
"""An update after step 3, and the masks are frozen after 6."""


class _Batches:
    """Text of zeros, two micro-batches a step; keeps what was waited for until each step."""

    position = 0
    teacher_logits = None
    layout = BatchLayout(micro_batch=1, accumulation=1, world_size=3, rank=1)

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.waits: list[dict[str, int]] = []

    def stop_waiting_if(self, should_stop: Any) -> None:
        """All text is there."""

    def prepare_step(self) -> None:
        """Note what the host has waited for so far."""
        self.waits.append(dict(self._counter.cost.syncs))

    def micro_batches(self, _sequences: range, with_logits: bool = True) -> list[MicroBatch]:
        """Return one micro-batch of zeros."""
        ids = torch.zeros((1, 6), dtype=torch.int64)
        return [MicroBatch(ids, ids)]

    def step(self) -> list[MicroBatch]:
        """Return the micro-batches of a step."""
        return self.micro_batches(range(0))

    def advance(self) -> None:
        """Count a micro-batch as consumed."""
        self.position += 1

    def scalars(self) -> dict[str, float]:
        """Return nothing to log."""
        return {}


class _Objective:
    """The model's own loss."""

    teacher = None
    one_at_a_time = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def why_whole_logits(self, _ids: Tensor) -> None:
        """Blocks of logits would do."""

    @contextmanager
    def targets(self, batches: Sequence[MicroBatch]) -> Iterator[list[None]]:
        """Hold nothing."""
        yield [None for _ in batches]

    def loss(self, batch: MicroBatch, _target: None, _progress: float) -> tuple[Tensor, Tensor]:
        """Return the loss of a micro-batch and its parts."""
        loss = self._model(input_ids=batch.token_BS, labels=batch.label_BS).loss
        return loss, torch.stack([loss.detach().float()] * len(LOSSES))


def waits() -> dict[str, Any]:
    """Inside a FakeTensorMode. Waits of each step by place, and the order of the engine's steps and the log's reads."""
    order: list[str] = []

    class Event:
        """Event of a device that notes its use."""

        def __init__(self, device: torch.device) -> None:
            assert device == CUDA
            self.step = 0

        def record(self) -> None:
            """Note the step that it stands behind."""
            self.step = forge.step_count
            order.append(f"copy {self.step}")

        def synchronize(self) -> None:
            """Note a read of the step."""
            order.append(f"read {self.step}")

    # A forge whose waits for the device are counted.
    config = sf.SparseForgeConfig.from_dict(BLOCK)
    rank = Rank(3, 1, 1)
    with process_group(rank):
        model = sf.prepare(model_of(MODELS["llama"]().config, torch.float32), config)
        with Counter() as counter, counter.phase() as cost:
            forge, engine = attach(model, config, rank, counter)
            with counter.paused():
                norm = torch.zeros((), device=CUDA)
            engine.get_global_grad_norm = lambda: norm  # type: ignore[attr-defined]
            step_engine = engine.step

            # Note the engine's steps in the same list as the log's reads.
            def step() -> None:
                order.append(f"step {forge.step_count + 1}")
                step_engine()

            forge.finish = lambda: None  # type: ignore[method-assign] # all values are ones
            engine.step = step  # type: ignore[method-assign]
            # The loop with nothing around it: no checkpoints, no evaluation, no signals.
            batches = _Batches(counter)
            spec = SimpleNamespace(
                arguments=SimpleNamespace(resume=False, save_every=0, seq_length=6),
                config=config,
                steps=STEPS,
                tokens_per_step=6,
                learning_rate=LearningRate(1e-3, 0.0, 1.0, STEPS),
                share_of_rate=lambda _group: 1.0,
            )
            context: Any = SimpleNamespace(
                spec=spec, engine=engine, forge=forge, batches=batches, objective=_Objective(model), device=CUDA
            )
            context.ranks = SimpleNamespace(world_size=3, on_first=lambda work: work())
            context.beginning = None
            context.rates = 0.0
            nothing: Any = mock.MagicMock(requested=0)
            nothing.due.return_value = False
            monitor = Monitor(None, 0, STEPS, 6, 1)
            with (
                mock.patch.object(torch, "Event", Event),
                mock.patch.object(
                    step_log.StepLog, "asked_to_stop", mock.PropertyMock(return_value=False), create=True
                ),
                mock.patch.object(step_log.dist, "all_reduce", dist.all_reduce),
                mock.patch.object(loop, "save", lambda *_: None),
                mock.patch.object(loop, "run_result", lambda *_: None),
            ):
                loop.train(context, nothing, monitor, nothing, nothing)
            batches.prepare_step()
    # Waits of each step: what the counts grew by between two batches.
    steps = [
        {caller: count - before.get(caller, 0) for caller, count in after.items() if count > before.get(caller, 0)}
        for before, after in zip(batches.waits[:-1], batches.waits[1:], strict=True)
    ]
    return {"steps": steps, "order": order, "faults": cost.faults}
