"""Source of an export that reads a checkpoint of a run: mask * dense with exact +0.0, quantized if the run is.

The mask of an unfinished run is projected as training would do it at that moment: the N largest of each group stay,
and ties go to the lower index. Before the first mask update all members tie, and the N largest dense weights stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.checkpoint.damage import suggest_intact_checkpoint
from sparseforge_ds.checkpoint.folder import find_checkpoint, find_run, read_json_object
from sparseforge_ds.checkpoint.pt_file import PtFile
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.checkpoint.tensors import TensorSpec
from sparseforge_ds.checkpoint.zero_partitions import KEPT
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.run_state import RunState, SparseWeight
from sparseforge_ds.export.counting import chunk_ranges, count_members
from sparseforge_ds.export.source import (
    Source,
    check_config,
    choose_dtype,
    origin_sections,
    read_config_json,
    require_finite,
    require_same_model,
)
from sparseforge_ds.export.workers import each
from sparseforge_ds.mask.kernels.codes import values_of
from sparseforge_ds.mask.kernels.groups import survivors
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.mask.quantization import SCALE_DTYPE, quantize, quantized, scale_group
from sparseforge_ds.model.family_table import BRANCH, LOW_RANK, SCALE
from sparseforge_ds.model.hub_access import public_name
from sparseforge_ds.model.registration import load_config
from sparseforge_ds.model.saved_names import saved_tensors
from sparseforge_ds.model.stored_config import config_sha256


def read_masked(checkpoint: Checkpoint, name: str, released: bool, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Read a part of a weight's mask and of its dense weight, both (stop - start,) in fp32.

    Args:
        checkpoint: with both.
        name: of the weight.
        released: True if the checkpoint stores one bit a weight in place of masks.
        start: first element, flat.
        stop: one behind the last element.

    Raises:
        ValueError: the weight has no mask yet.
    """
    states = checkpoint.states(name)
    if released:
        if KEPT not in states:
            raise ValueError(f"{checkpoint.folder}: {name} has no mask yet; it comes with the start of a run")
        dense = checkpoint.slice(name, "dense" if "dense" in states else None, start, stop).float()
        return checkpoint.slice(name, KEPT, start, stop).float(), dense
    if not {"mask", "dense"} <= set(states):
        raise ValueError(f"{checkpoint.folder}: {name} has no mask yet; it comes with the first optimizer step")
    mask, dense = (values_of(checkpoint.slice(name, key, start, stop)) for key in ("mask", "dense"))
    return mask, dense


class RunSource(Source):
    """Final weights of a checkpoint with masks in it."""

    def __init__(self, path: str | Path, model: str | Path | None = None, dtype: str = "auto") -> None:
        """Open a checkpoint; the arguments are those of `open_source`.

        Raises:
            ValueError: the checkpoint is damaged, has no masks, or does not belong to the model.
        """
        with suggest_intact_checkpoint(find_checkpoint(path)):
            self.checkpoint = Checkpoint(path)
        self.folder = self.checkpoint.folder
        # The state of the forge, and a mask for every weight that it lists.
        saved = RunState.parse(self.checkpoint.client_state.get("sparseforge"), str(self.folder))
        saved.check_shapes(self.checkpoint.shapes, str(self.folder))
        self.config = saved.config
        self.pattern = self.config.parsed_pattern
        self.step = saved.step
        self.quantize = self.config.quantize if self.config.is_quantized(self.step, hard=True) else None
        self.released = self.step >= self.config.release_step
        """True if masks are stored as one bit a weight."""
        self.finished = self.step >= self.config.resolved_schedule.freeze_step
        self.formed = self._has_formed_masks(saved)
        """True if masks have moved; as long as all values are 1 they decide nothing."""
        masked = {weight.name: weight for weight in saved.weights}
        self._check_masks(masked)
        # The model that the weights belong to.
        run = find_run(path)
        self.model_folder = self._find_model_folder(Path(path), model, run)
        self.model_config = read_config_json(self.model_folder)
        self.dtype = choose_dtype(dtype, self.model_folder, self.model_config)
        description = read_json_object(run / "sparseforge.json") if run else {}
        config_hash = description.get("config_sha256")
        if model is None:
            check_config(self.model_folder, self.model_config, config_hash)
        elif run is not None and config_sha256(self.model_config) != config_hash:
            own_folder = run / "model"
            if (own_folder / "config.json").is_file():
                check_config(own_folder, read_config_json(own_folder), config_hash)
                require_same_model(self.model_folder, own_folder)
        # Its tensors by saved names, and the branches beside them.
        self._name_tensors()
        self._specify(masked)
        self.branches = {
            name.rpartition(".")[0]: (shape[0], shape[1])
            for name, shape in self.checkpoint.shapes.items()
            if name.rpartition(".")[2] == LOW_RANK
        }
        self.record = self._make_record(description)
        if run:
            origin_sections(run / "sparseforge.json", self.record, "restore the file")

    def _has_formed_masks(self, saved: RunState) -> bool:
        measured = not self.config.keeps_curvature or saved.refreshes > 0
        updated = self.step >= self.config.resolved_schedule.update_every and measured
        return self.config.method.name != "sparseforge" or updated

    def _check_masks(self, masked: Mapping[str, SparseWeight]) -> None:
        """Raise ValueError unless exactly the listed weights have a mask."""
        for name in masked:
            read_masked(self.checkpoint, name, self.released, 0, 0)
        for name in self.checkpoint.shapes:
            if name not in masked and {"mask", KEPT} & set(self.checkpoint.states(name)):
                raise ValueError(
                    f"{self.folder}: {name} has a mask, but its client state does not list it; it is damaged"
                )

    def _find_model_folder(self, path: Path, model: str | Path | None, run: Path | None) -> Path:
        """Return the folder with config.json: the given one, that of the run, or the one of transformers' Trainer."""
        if model is not None:
            return Path(model)
        if run is not None:
            return run / "model"
        for folder in (self.folder.parent, path):  # the Trainer saves the model beside its checkpoint
            if (folder / "config.json").is_file():
                return folder
        raise ValueError(f"{path}: is in no run folder; give the folder with config.json and tokenizer by --model")

    def _name_tensors(self) -> None:
        """Map saved names to tensors of the checkpoint."""
        shapes = self.checkpoint.shapes
        self._origin = {name: name for name in shapes if name.rpartition(".")[2] not in (*BRANCH, SCALE)}
        """Name in the checkpoint of each tensor of the model."""
        # A tied head is written if config.json does not tie it.
        tied = self.model_config.get("tie_word_embeddings")
        if tied is None:  # the class of some families ties by itself
            tied = load_config(self.model_folder, str(self.model_folder)).tie_word_embeddings
        if not tied:
            aliases = self.checkpoint.aliases.items()
            self._origin |= {alias: name for alias, name in aliases if name in self._origin}
        model_shapes = {name: shapes[stored_name] for name, stored_name in self._origin.items()}
        self._saved_tensors = saved_tensors(self.model_config.get("model_type"), model_shapes)
        self.fused_name = {
            name: part.memory_name for name, part in self._saved_tensors.items() if part.memory_name != name
        }

    def _specify(self, masked: Mapping[str, SparseWeight]) -> None:
        """Fill `specs` and `prunable`."""
        self.specs = {}
        self.prunable = {}
        for name, part in self._saved_tensors.items():
            stored_name = self._origin[part.memory_name]
            is_buffer = stored_name in self.checkpoint.buffers
            dtype = self.checkpoint.entries[stored_name].trained_dtype if is_buffer else self.dtype
            self.specs[name] = TensorSpec(part.shape, dtype)
            if stored_name in masked:
                axis = masked[stored_name].input_axis
                self.prunable[name] = SparseWeight(name, part.shape, axis)
                if (cause := self.pattern.misfit(part.shape, axis)) is not None:
                    raise ValueError(
                        f"{self.folder}: {name}, a part of {stored_name}, cannot be {self.pattern}: {cause}"
                    )

    def _make_record(self, description: dict[str, Any]) -> dict[str, Any]:
        """Return the head of `sparsity.json`; `description` is the run's `sparseforge.json`."""
        return {
            "format": 1,
            "dtype": str(self.dtype).removeprefix("torch."),
            "pattern": str(self.pattern),
            "finished": self.finished,
            "step": self.step,
            "source": {
                "checkpoint": self.folder.name,
                "zero_stage": self.checkpoint.stage,
                "ranks": self.checkpoint.world_size,
            },
            "coverage": description.get("coverage") or {},
            "config": self.config.to_dict(),
            "run": describe_run(description, self.checkpoint.launcher_state, self.step, self.config),
        }

    @override
    def read(self, name: str) -> Tensor:
        spec = self.specs[name]
        weight = self.prunable.get(name)
        flat = torch.empty(math.prod(spec.shape), dtype=spec.dtype)
        period = 1 if weight is None else self._period(weight)
        for start, stop in chunk_ranges(flat.numel(), period):
            if weight is None:
                flat[start:stop] = self._state(name, None, start, stop)
            else:
                flat[start:stop] = self._sparse(weight, start, stop).to(spec.dtype) + 0.0  # rounding gives -0.0
        require_finite(flat, name, self.checkpoint.folder)
        return flat.view(spec.shape)

    @override
    def read_branch(self, name: str) -> Tensor:
        value = self.checkpoint.weight(name).to(self.dtype)
        require_finite(value, name, self.checkpoint.folder)
        return value

    @override
    def check_bytes(self, workers: int | None = None) -> None:
        with suggest_intact_checkpoint(self.folder):
            each(PtFile.check_bytes, self.checkpoint.files, workers)

    def _state(self, name: str, key: str | None, start: int, stop: int) -> Tensor:
        """Read elements start..stop of a saved tensor, as `Checkpoint.slice` does."""
        part = self._saved_tensors[name]
        return self.checkpoint.slice(self._origin[part.memory_name], key, part.start + start, part.start + stop)

    def _kept(self, weight: SparseWeight, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return hard(mask) and the dense weight in fp32 of whole periods start..stop, (stop - start,) each."""
        pattern = self.pattern
        part = self._saved_tensors[weight.name]
        stored_name = self._origin[part.memory_name]
        mask, dense = read_masked(self.checkpoint, stored_name, self.released, part.start + start, part.start + stop)
        # An unfinished mask is projected.
        if not self.finished:
            value_GM = pattern.to_groups(mask if self.formed else dense.square(), weight.shape, weight.input_axis)
            return pattern.from_groups(survivors(value_GM, pattern), weight.shape, weight.input_axis), dense
        # A frozen one has N members in every group.
        kept = mask != 0
        kept_G = count_members(kept, pattern, weight.shape, weight.input_axis)
        is_full = bool((kept_G == pattern.kept_count).all()) and int(kept.sum()) == kept_G.numel() * pattern.kept_count
        if not is_full or not torch.equal(kept.float(), mask):
            raise ValueError(
                f"{self.checkpoint.folder}: {weight.name} is not {pattern} although its mask was "
                f"frozen before step {self.step}; the checkpoint is inconsistent, use another one"
            )
        return kept, dense

    def _period(self, weight: SparseWeight) -> int:
        """Return the elements of the smallest part of a weight that can be read by itself."""
        period = self.pattern.period(weight.shape, weight.input_axis)
        if self.quantize is None:
            return period
        return math.lcm(period, self._scale_group(weight).period(weight.shape, weight.input_axis))

    def _scale_group(self, weight: SparseWeight) -> NM:
        """Return the inputs of a quantized weight that share a scale."""
        assert self.quantize is not None
        return scale_group(self.pattern, self.quantize.group_size, weight.shape[weight.input_axis])

    def _to_quantize(self, weight: SparseWeight, start: int, stop: int) -> Tensor:
        """Return hard(mask) * dense as masters have it before it is quantized: (G, I), inputs that share a scale."""
        value = self._masked(weight, start, stop).to(self._state(weight.name, None, start, start).dtype)
        return self._scale_group(weight).to_groups(value.float(), weight.shape, weight.input_axis)

    @override
    def codes(self, name: str) -> tuple[Tensor, Tensor]:
        weight = self.prunable[name]
        assert self.quantize is not None
        codes = torch.empty(math.prod(weight.shape), dtype=torch.int8)
        scales = []
        for start, stop in chunk_ranges(codes.numel(), self._period(weight)):
            code_GI, scale_G1 = quantize(self._to_quantize(weight, start, stop), self.quantize.bits)
            group = self._scale_group(weight)
            codes[start:stop] = group.from_groups(code_GI, weight.shape, weight.input_axis).to(torch.int8)
            scales.append(scale_G1.view(-1).to(SCALE_DTYPE))
        shape = list(weight.shape)
        shape[weight.input_axis] //= self._scale_group(weight).members
        return codes.view(weight.shape), torch.cat(scales).view(shape)

    def _masked(self, weight: SparseWeight, start: int, stop: int) -> Tensor:
        """Return hard(mask) * dense (eq. 11) in fp32 of elements start..stop, with pruned members exactly +0.0."""
        kept, dense = self._kept(weight, start, stop)
        value = torch.where(kept, dense, 0.0)
        return value if self.finished else value * self._scale(weight, start, stop)

    def _sparse(self, weight: SparseWeight, start: int, stop: int) -> Tensor:
        """Return Q(hard(mask) * dense) (eqs. 11 and 14) in fp32 of elements start..stop; pruned members are 0."""
        if self.quantize is None:
            value = self._masked(weight, start, stop)
        else:
            value_GI = quantized(self._to_quantize(weight, start, stop), self.quantize.bits)
            value = self._scale_group(weight).from_groups(value_GI, weight.shape, weight.input_axis)
        if not self.finished:
            return value
        master = self._state(weight.name, None, start, stop)
        if not torch.equal(value.to(master.dtype), master):  # masters may be bf16
            raise ValueError(
                f"{self.checkpoint.folder}: the master of {weight.name} is not mask * dense, or its quantization, "
                "although its mask is frozen; the checkpoint is inconsistent, use another one"
            )
        return value

    def _scale(self, weight: SparseWeight, start: int, stop: int) -> Tensor:
        """Return CAST's factor of each element, which is folded into the weights when the mask freezes; 1 without."""
        part = self._saved_tensors[weight.name]
        stored_name = self._origin[part.memory_name]
        scale_name = f"{stored_name.rpartition('.')[0]}.{SCALE}"
        if scale_name not in self.checkpoint.shapes:
            return torch.ones(())
        # Each output of the layer has one factor.
        index = torch.arange(part.start + start, part.start + stop)
        columns = self.checkpoint.shapes[stored_name][-1]
        output = index // columns if weight.input_axis == -1 else index % columns
        return self.checkpoint.weight(scale_name).float()[output]


def describe_run(description: dict[str, Any], train: object, step: int, config: SparseForgeConfig) -> dict[str, Any]:
    """Return the entry `run` of `sparsity.json`, which has no paths of this machine; empty for a foreign run.

    Args:
        description: content of the run's `sparseforge.json`.
        train: state of the trainer in the checkpoint.
        step: of the checkpoint.
        config: the run's block.
    """
    flags = description.get("run")
    public_names = description.get("public_names")
    if not isinstance(flags, dict) or not isinstance(public_names, dict):
        return {}
    names = {key: public_names[key] for key in ("model", "teacher") if isinstance(public_names.get(key), str)}
    dataset = public_names.get("dataset")
    texts = [text for text in dataset if isinstance(text, str)] if isinstance(dataset, list) else []
    keys = ("seq_length", "global_batch", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs")
    settings = {key: flags.get(key) for key in keys}
    # The loss that the run itself measured at this step, of a network that is the exported one.
    train_state = train if isinstance(train, dict) else {}
    evaluation = _evaluation_at(step, train_state.get("evaluations")) if config.is_exact(step) else None
    # Of the text that the newest launch was given, the name is known for certain.
    is_newest_text = train_state.get("evaluations", {}).get("text") == flags.get("eval_dataset")
    if evaluation is not None and is_newest_text and isinstance(public_names.get("eval_dataset"), str):
        evaluation["text"] = public_names["eval_dataset"]
    return {**names, "dataset": texts, **settings, "tokens": train_state.get("tokens"), "evaluation": evaluation}


def _evaluation_at(step: int, evaluations: object) -> dict[str, Any] | None:
    """Return the loss of a step with the text that it was measured on, or None if there is none."""
    if not isinstance(evaluations, dict):
        return None
    losses = evaluations.get("losses")
    loss = losses.get(str(step)) if isinstance(losses, dict) else None
    if not isinstance(loss, float):
        return None
    sizes = {key: evaluations.get(key) for key in ("sequences", "seq_length")}
    return {"loss": loss, **sizes, "text": public_name(str(evaluations.get("text")))}
