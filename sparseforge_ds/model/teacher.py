"""Frozen dense model that a student is distilled from: partitioned by ZeRO-3 inference, or whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import set_z3_leaf_modules_by_name
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.config.deepspeed_config import training_dtype
from sparseforge_ds.model.expert_modules import leaf_modules
from sparseforge_ds.model.family_table import FAMILIES
from sparseforge_ds.model.head import Head, Target, head_of, hidden_states, micro_batches_at_once, refuse_labels
from sparseforge_ds.model.hidden import capture_states, compared_layers
from sparseforge_ds.model.hub_access import find_path
from sparseforge_ds.model.pretrained import load_pretrained
from sparseforge_ds.model.registration import register_model_classes


class Teacher:
    """A frozen dense model that answers with final hidden states, or with logits.

        teacher = Teacher.from_pretrained("path", config.distillation, ds_config)
        with teacher.targets([{"input_ids": batch["input_ids"]} for batch in micro_batches]) as targets:
            for batch, target in zip(micro_batches, targets):
                loss, _ = loss_in_head(engine, batch["labels"], config.distillation, target, **inputs)

    `hold="zero3"` partitions it over the ranks by an engine of its own without an optimizer, whatever the stage of the
    student; `hold="replicated"` keeps it whole on every rank. It never trains, drops nothing and keeps no cache.
    """

    def __init__(self, model: PreTrainedModel, config: DistillationConfig, ds_config: dict[str, Any]) -> None:
        """Freeze `model` and place it; collective with `hold="zero3"`.

        Args:
            model: with a head that `model.task_head` knows, partitioned by ZeRO-3 already or not.
            config: its `hold` and `hidden` are used.
            ds_config: the student's DeepSpeed configuration, with no "auto" left: the teacher computes in its dtype.

        Raises:
            ValueError: a partitioned model that is to be replicated, a quantized weight, a dtype that is still "auto",
                or no configuration.
        """
        _refuse_configs(config, ds_config)
        dtype = training_dtype(ds_config)
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                raise ValueError(
                    f"teacher {type(model).__name__}: {name} is {parameter.dtype}, a quantized weight, which can be "
                    "neither divided over the ranks nor cast to the student's dtype; give the model that it was made of"
                )
            if not hasattr(parameter, "ds_id"):  # rotary frequencies, which are buffers, stay fp32 as in DeepSpeed
                parameter.data = parameter.data.to(dtype)
        model.requires_grad_(False)
        self.model = model
        self._layers = compared_layers(model, config.hidden) if config.hidden else []
        # An engine of its own partitions the weights, or every rank keeps them all.
        self._module: nn.Module
        if config.hold == "zero3":
            if model.config.model_type in FAMILIES:  # a dense teacher may be of a family without rows
                set_z3_leaf_modules_by_name(model, leaf_modules(model))
            self._module, *_ = deepspeed.initialize(model=model, config=teacher_ds_config(ds_config))
        else:
            if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
                raise ValueError(
                    'distillation.hold = "replicated", but the teacher was partitioned by ZeRO-3 as it was loaded; '
                    'load it with Teacher.from_pretrained, or set "hold": "zero3"'
                )
            self._module = model.to(get_accelerator().current_device_name())
        self._module.eval()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: DistillationConfig,
        ds_config: dict[str, Any],
        model_class: Any = AutoModelForCausalLM,
        **kwargs: Any,
    ) -> Teacher:
        """Load a teacher in the layout that it keeps: partitioned with `hold="zero3"`, whole otherwise.

        Args:
            path: folder or hub id.
            config: its `hold` is used.
            ds_config: the student's DeepSpeed configuration.
            model_class: whose `from_pretrained` loads it; the student's own if that is no causal language model.
            **kwargs: passed to `from_pretrained`; `dtype` is the student's by default. No code of the teacher's own is
                run.

        Raises:
            ValueError: it cannot be loaded, weights are missing in its files, a dtype is still "auto", or there is no
                configuration.
        """
        _refuse_configs(config, ds_config)
        find_path(path, f"teacher {path}")
        register_model_classes()
        partition = teacher_ds_config(ds_config) if config.hold == "zero3" else None
        options = {"dtype": training_dtype(ds_config), **kwargs}
        model = load_pretrained(path, f"teacher {path}", partition=partition, model_class=model_class, **options)
        return cls(model, config, ds_config)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Return logits (B, S, V) without a gradient; collective with `hold="zero3"`.

        Args:
            input_ids: (B, S) token ids.
            **inputs: others of the forward pass, such as attention_mask and position_ids.
        """
        logits: Tensor = self._run(input_ids, inputs).logits
        return logits

    @torch.no_grad()
    def hidden_states(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Return the final hidden states (B, S, H), which are the head's input, of token ids (B, S).

        It is collective with `hold="zero3"`.

        Raises:
            NonlinearHeadError: the model scales or caps its logits behind the head.
        """
        return hidden_states(self.model, lambda: self._run(input_ids, inputs))

    @contextmanager
    def captured(self) -> Iterator[list[Tensor] | None]:
        """Collect the hidden states of the pass in the block that are distilled; yields None if none are."""
        if not self._layers:
            yield None
            return
        with capture_states(self._layers) as states:
            yield states

    def _run(self, input_ids: Tensor, inputs: Mapping[str, Any]) -> Any:
        return self._module(input_ids=input_ids, use_cache=False, **inputs)

    @contextmanager
    def targets(self, micro_batches: Sequence[Mapping[str, Any]]) -> Iterator[list[Target]]:
        """Run the teacher on all micro-batches of a step; its head stays gathered in the block.

        The model runs over `micro_batches_at_once`, so that its weights are gathered once, or a few times, a step. With
        `distillation.hidden` the states of its layers are kept too: give it one micro-batch at a time.

        Args:
            micro_batches: the inputs of the forward pass of each, as many on every rank: input_ids, (B, S), and others
                such as attention_mask and position_ids. Of several micro-batches all are (B, S).

        Raises:
            ValueError: inputs of several micro-batches that are not of one shape, or labels among them.
            NonlinearHeadError: as `hidden_states`.
        """
        for inputs in micro_batches:
            refuse_labels(inputs)
        if len(micro_batches) > 1:
            shapes = {tuple(value.shape) for inputs in micro_batches for value in inputs.values()}
            if len(shapes) > 1:
                raise ValueError(f"micro-batches have inputs of {sorted(shapes)}: ask for one at a time")
        batch, length = micro_batches[0]["input_ids"].shape
        at_once = micro_batches_at_once(batch * length)
        hidden: list[tuple[Tensor, list[Tensor] | None]] = []
        for first in range(0, len(micro_batches), at_once):
            # Several micro-batches pass the model as one.
            group = micro_batches[first : first + at_once]
            inputs = group[0]
            if len(group) > 1:
                inputs = {key: torch.cat([micro_batch[key] for micro_batch in group]) for key in inputs}
            with self.captured() as states:
                final = self.hidden_states(**inputs).split(batch)
            layers = zip(*(state.split(batch) for state in states), strict=True) if states else [()] * len(final)
            for hidden_BSH, layers_BSH in zip(final, layers, strict=True):
                hidden.append((hidden_BSH, list(layers_BSH) or None))
            # The backward pass frees the states, unless a name here keeps them.
            del states, final, layers, hidden_BSH, layers_BSH
        layer = head_of(self.model)
        with deepspeed.zero.GatheredParameters(list(layer.parameters(recurse=False))):
            head = Head(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
            targets = [Target(hidden_BSH, head, states) for hidden_BSH, states in hidden]
            del hidden, head
            try:
                yield targets
            finally:
                targets.clear()


def _refuse_configs(config: DistillationConfig | None, ds_config: object) -> None:
    """Raise ValueError where there is no distillation, or no parsed JSON, before a model is loaded."""
    if config is None:
        raise ValueError(
            "distillation is null in the sparseforge block, and there is a teacher: leave the teacher out, or take the "
            "key out of the block for its defaults"
        )
    if not isinstance(ds_config, dict):
        raise ValueError(f"ds_config = {ds_config!r}: give a teacher the parsed JSON, json.load(open(...))")


_ZERO3_KEYS = (
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "overlap_comm",
    "offload_param",
    "leaf_module",
    "zero_quantized_nontrainable_weights",
)
"""Keys of the student's `zero_optimization` for a teacher: the ways in which weights are partitioned and gathered."""


def teacher_ds_config(ds_config: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed config of a teacher under ZeRO-3, with the student's dtype and gathering."""
    zero = {
        key: value
        for key, value in ds_config.get("zero_optimization", {}).items()
        if key in _ZERO3_KEYS and value != "auto"
    }
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero}}
    dtype = training_dtype(ds_config)
    if dtype != torch.float32:
        config["bf16" if dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
    return config
