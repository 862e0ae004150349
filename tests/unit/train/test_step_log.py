"""Numbers of steps that are read a step later."""

from __future__ import annotations

import math
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparseforge_ds.train import step_log
from sparseforge_ds.train.divergence import PATIENCE, DivergenceWatch, TrainingDivergedError
from sparseforge_ds.train.objective import LOSSES
from sparseforge_ds.train.step_log import StepLog


class Run:
    """A run whose steps have the losses that a test gives them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(step_log, "waits_for", lambda device: True)
        monkeypatch.setattr(step_log.dist, "all_reduce", lambda tensor: None)
        self.logged: list[tuple[int, float, str]] = []
        self.tidied = 0
        self.step = 0
        context: Any = SimpleNamespace(
            batches=SimpleNamespace(
                layout=SimpleNamespace(accumulation=2),
                scalars=lambda: {"data/tokens": float(self.step)},
                teacher_logits=None,
            ),
            device=torch.device("cpu"),
            engine=SimpleNamespace(get_global_grad_norm=lambda: torch.tensor(0.1 * self.step)),
            forge=SimpleNamespace(metrics={}, dials=None),
            objective=SimpleNamespace(teacher=None),
            ranks=SimpleNamespace(world_size=1),
            spec=SimpleNamespace(
                learning_rate=lambda step: 0.5 / (1 + step),
                steps=30,
                dtype=torch.float32,
                deepspeed={"optimizer": {"params": {}}},
            ),
        )
        self.forge = context.forge
        checkpoints: Any = SimpleNamespace(remove_old=self._tidy, newest_before=lambda step: (None, []))
        monitor: Any = SimpleNamespace(step=self._note, write=lambda step, metrics: None)
        self.watch = DivergenceWatch(checkpoints, context.spec, 0)
        self.log = StepLog(context, checkpoints, monitor, self.watch)

    def take(self, loss: float, stop: bool = False) -> None:
        """Make a step, as the loop does."""
        self.log.read()
        before = self.step
        self.step += 1
        self.forge.step_count = self.step
        self.forge.phase = f"phase {self.step}"
        losses = torch.zeros(len(LOSSES))
        losses[:2] = 2 * loss
        self.log.add(before, losses, stop, mask_updated=False)

    def _tidy(self) -> None:
        self.tidied += 1

    def _note(self, step: int, scalars: dict[str, float], phase: str, dials: None, end_time: float) -> None:
        assert scalars["train/learning_rate"] == 0.5 / step and scalars["data/tokens"] == step
        assert scalars["train/grad_norm"] == float(torch.tensor(0.1 * step)) and scalars.keys() >= {"loss/total"}
        self.logged.append((step, scalars["loss/total"], phase))


def test_a_step_is_logged_in_the_next_one_with_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    for step in (1, 2, 3):
        run.take(step / 7, stop=step == 2)
        assert [logged[0] for logged in run.logged] == list(range(1, step))
        assert run.log.asked_to_stop == (step == 3)
    run.log.read()
    run.log.read()
    assert run.logged == [(n, float(torch.tensor(n / 7)), f"phase {n}") for n in (1, 2, 3)] and run.tidied == 3
    assert run.log.scalars["data/tokens"] == 3.0


def test_a_bad_loss_keeps_the_number_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.take(1.0)
    for _ in range(PATIENCE):
        run.take(math.nan)
    assert not run.watch.loss_is_finite and run.tidied == 1
    with pytest.raises(TrainingDivergedError, match=f"nan for {PATIENCE} steps in a row, at step {PATIENCE + 1} with "):
        run.take(math.nan)
    assert [step for step, *_ in run.logged] == list(range(1, PATIENCE + 1))


def test_an_error_of_the_next_step_does_not_lose_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    with pytest.raises(RuntimeError), closing(run.log):
        run.take(1.0)
        raise RuntimeError("out of memory")
    assert [step for step, *_ in run.logged] == [1] and run.tidied == 0
    run.log.close()  # nothing is left
    assert len(run.logged) == 1
