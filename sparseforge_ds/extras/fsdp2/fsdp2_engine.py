"""The part of a DeepSpeed engine that a forge calls, over a model that FSDP2 shards."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


class Fsdp2Engine:
    """A training engine over `fully_shard`, with the calls of DeepSpeed's: forward, `backward` and `step`.

    Masters are fp32; `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` is FSDP2's way to compute in 16 bits.
    """

    sequence_parallel_size = 1
    skipped_steps = 0
    global_steps = 0
    enable_backward_allreduce = True

    def __init__(
        self,
        model: nn.Module,
        param_groups: list[dict[str, Any]],
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        gradient_accumulation_steps: int = 1,
        gradient_clipping: float = 0.0,
    ) -> None:
        """Build the optimizer on this rank's rows.

        Args:
            model: prepared by `sparseforge_ds.prepare`, then sharded by `fully_shard` on a one-dimensional mesh.
            param_groups: what `sparseforge_ds.param_groups` returns for the sharded model.
            make_optimizer: function of such param groups, whose parameters are this rank's rows; like
                `lambda param_groups: torch.optim.AdamW(param_groups, lr=1e-4)`.
            gradient_accumulation_steps: micro-batches of a step.
            gradient_clipping: largest norm of a step's gradients; 0 for any.

        Raises:
            ValueError: some weight is not divided along dimension 0 of a one-dimensional mesh, or is not fp32.
        """
        self.module = model
        self.optimizer = Fsdp2Optimizer(param_groups, make_optimizer, gradient_clipping)
        self.basic_optimizer = self.optimizer.inner
        self.device = self.optimizer.weights[0][0][1].device
        self._config = SimpleNamespace(_param_dict={})
        self._accumulation = gradient_accumulation_steps
        self.micro_steps = 0
        self._is_gradient_accumulation_boundary: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        return self.module(*args, **kwargs)

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches of a step."""
        return self._accumulation

    def gradient_clipping(self) -> float:
        """Return the largest norm of a step's gradients; 0 for any."""
        return self.optimizer.clip_grad

    def set_gradient_accumulation_boundary(self, boundary: bool | None) -> None:
        """Say whether the next `step` is an optimizer step; None counts micro-batches."""
        self._is_gradient_accumulation_boundary = boundary

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch's mean loss; FSDP2 reduces them."""
        (loss / self._accumulation).backward()

    def step(self) -> None:
        """Make an optimizer step after the last micro-batch of one."""
        self.micro_steps += 1
        boundary = self._is_gradient_accumulation_boundary
        if boundary if boundary is not None else self.micro_steps % self._accumulation == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_steps += 1

    def save_checkpoint(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuse: a checkpoint of masks has DeepSpeed's format."""
        raise ValueError("a run on FSDP2 cannot be saved for a resume yet; export its weights, or use DeepSpeed")

    load_checkpoint = save_checkpoint


class Fsdp2Optimizer:
    """An optimizer of this rank's rows, as plain parameters that share memory with FSDP2's DTensors.

    Optimizer hooks swap the data of what is stepped. A DTensor ignores that, without an error.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        clip_grad: float,
    ) -> None:
        """Pair each weight with its rows; arguments as in `Fsdp2Engine`."""
        self.weights: list[list[tuple[Any, nn.Parameter]]] = []
        """Pairs of (DTensor, this rank's rows) in each param group."""
        for group in param_groups:
            self.weights.append([(weight, nn.Parameter(self._rows_of(weight))) for weight in group["params"]])
        self.mesh = self.weights[0][0][0].device_mesh
        rows = [[rows for _, rows in group] for group in self.weights]
        self.inner = make_optimizer([{**group, "params": rows} for group, rows in zip(param_groups, rows, strict=True)])
        self.clip_grad = clip_grad

    @staticmethod
    def _rows_of(weight: Any) -> Tensor:
        """Return this rank's rows of a weight, in its own memory."""
        if not isinstance(weight, DTensor) or tuple(weight.placements) != (Shard(0),):
            placements = getattr(weight, "placements", "no DTensor")
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} is {placements}, not divided along dimension 0: call "
                "fully_shard on the whole model, with a one-dimensional mesh, before param_groups"
            )
        if weight.dtype != torch.float32:
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} is {weight.dtype}, and masters are fp32: load the model in "
                "fp32, and give fully_shard MixedPrecisionPolicy(param_dtype=...)"
            )
        return weight.to_local().detach()

    @torch.no_grad()
    def step(self) -> None:
        """Hand the reduced gradients to the inner optimizer, clipped, and step it."""
        pairs = [pair for group in self.weights for pair in group]
        for weight, rows in pairs:
            rows.grad = None if weight.grad is None else weight.grad.to_local()
        if self.clip_grad:
            nn.utils.clip_grad_norm_([weight for weight, _ in pairs], self.clip_grad)
        self.inner.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for weight, rows in (pair for group in self.weights for pair in group):
            weight.grad = rows.grad = None
