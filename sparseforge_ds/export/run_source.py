"""A run, or one checkpoint of it, as the source of an export: mask * dense with exact +0.0.

The mask of an unfinished run is projected as training would do it at that moment: the N largest of each group stay,
ties going to the lower index. Before the first mask update all members tie, and the N largest dense weights stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.checkpoint.damage import suggest_intact_checkpoint
from sparseforge_ds.checkpoint.folder import find_checkpoint, find_run, read_json
from sparseforge_ds.checkpoint.pt_file import PtFile
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.checkpoint.tensors import TensorSpec
from sparseforge_ds.config.run_state import RunState, SparseWeight
from sparseforge_ds.export.counting import chunks, members_left
from sparseforge_ds.export.source import Source, check_config, choose_dtype, read_model_config, require_finite
from sparseforge_ds.export.workers import each
from sparseforge_ds.mask.effective_mask import is_kept
from sparseforge_ds.mask.kernels.codes import values_of
from sparseforge_ds.mask.kernels.groups import top_n
from sparseforge_ds.model.family_table import BRANCH, LOW_RANK, SCALE
from sparseforge_ds.model.hub_access import published_name
from sparseforge_ds.model.published_names import published_tensors
from sparseforge_ds.model.registration import load_config


def read_masked(checkpoint: Checkpoint, name: str, released: bool, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Elements start..stop of a weight's mask and of its dense weight, in fp32: both (stop - start,). Once
    `released`, masks are not stored any more: what is not zero is kept."""
    states = checkpoint.states(name)
    if released:
        dense = checkpoint.slice(name, "dense" if "dense" in states else None, start, stop).float()
        return is_kept(dense).float(), dense
    if not {"mask", "dense"} <= set(states):
        raise ValueError(f"{checkpoint.folder}: {name} has no mask yet; it comes with the first optimizer step")
    mask, dense = (values_of(checkpoint.slice(name, key, start, stop)) for key in ("mask", "dense"))
    return mask, dense


class RunSource(Source):
    """Final weights of a checkpoint with masks in it; arguments of `open_source`."""

    def __init__(self, path: str | Path, model: str | Path | None = None, dtype: str = "auto") -> None:
        with suggest_intact_checkpoint(find_checkpoint(path)):
            self.checkpoint = checkpoint = Checkpoint(path)
        state = checkpoint.client_state.get("sparseforge")
        saved = RunState.parse(state, str(checkpoint.folder))
        saved.check_shapes(checkpoint.shapes, str(checkpoint.folder))
        self.config = saved.config
        self.pattern = self.config.parsed_pattern
        self.step = saved.step
        self.released = self.step >= self.config.release_step
        """Whether masks are not stored any more: pruned weights are +0.0."""
        masked = {weight.name: weight for weight in saved.weights}
        for name in masked:
            read_masked(checkpoint, name, self.released, 0, 0)
        if unlisted := [name for name in checkpoint.shapes if "mask" in checkpoint.states(name) and name not in masked]:
            raise ValueError(
                f"{checkpoint.folder}: {unlisted[0]} has a mask, but its client state does not list it; it is damaged"
            )
        run = find_run(path)
        if model is None and run is None:
            beside = (checkpoint.folder.parent, Path(path))  # where transformers' Trainer saves it
            model = next((folder for folder in beside if (folder / "config.json").is_file()), None)
            if model is None:
                raise ValueError(
                    f"{path}: is in no run folder; give the folder with config.json and tokenizer by --model"
                )
        self.model_folder = Path(model) if model is not None else Path(run or path) / "model"
        self.model_config = read_model_config(self.model_folder)
        self.dtype = choose_dtype(dtype, self.model_folder, self.model_config)
        self.folder = checkpoint.folder
        shapes = checkpoint.shapes
        self._origin = {name: name for name in shapes if name.rpartition(".")[2] not in (*BRANCH, SCALE)}
        if (tied := self.model_config.get("tie_word_embeddings")) is None:  # some families tie where it says nothing
            tied = load_config(self.model_folder, str(self.model_folder), cached=True).tie_word_embeddings
        if not tied:
            self._origin |= {alias: name for alias, name in checkpoint.aliases.items() if name in self._origin}
        self._published = published_tensors(
            self.model_config.get("model_type"), {name: shapes[real] for name, real in self._origin.items()}
        )
        self.fused_name = {name: part.of for name, part in self._published.items() if part.of != name}
        self.specs, self.prunable = {}, {}
        for name, part in self._published.items():
            real = self._origin[part.of]
            kept = checkpoint.entries[real].trained_dtype if real in checkpoint.buffers else self.dtype
            self.specs[name] = TensorSpec(part.shape, kept)
            if real in masked:
                self.prunable[name] = SparseWeight(name, part.shape, masked[real].input_axis)
                if (why := self.pattern.misfit(part.shape, masked[real].input_axis)) is not None:
                    raise ValueError(f"{checkpoint.folder}: {name}, a part of {real}, cannot be {self.pattern}: {why}")
        branches = {name.rpartition(".")[0]: s for name, s in shapes.items() if name.rpartition(".")[2] == LOW_RANK}
        self.branches = {name: (shape[0], shape[1]) for name, shape in branches.items()}
        schedule = self.config.resolved_schedule
        self.finished = self.step >= schedule.freeze_step
        measured = not self.config.keeps_curvature or saved.refreshes > 0
        self.formed = self.config.method.name != "sparseforge" or (self.step >= schedule.update_every and measured)
        """Whether masks have moved yet; while all are 1 they say nothing."""
        described = read_json(run / "sparseforge.json") if run else {}
        if model is None:
            check_config(self.model_folder, self.model_config, described.get("config_sha256"))
        self.record = {
            "format": 1,
            "dtype": str(self.dtype).removeprefix("torch."),
            "pattern": str(self.pattern),
            "finished": self.finished,
            "step": self.step,
            "source": {
                "checkpoint": checkpoint.folder.name,
                "zero_stage": checkpoint.stage,
                "ranks": checkpoint.world_size,
            },
            "coverage": described.get("coverage") or {},
            "config": self.config.to_dict(),
            "run": _run_of(described, checkpoint.client_state.get("train"), self.step),
        }

    @override
    def read(self, name: str) -> Tensor:
        spec, weight = self.specs[name], self.prunable.get(name)
        flat = torch.empty(math.prod(spec.shape), dtype=spec.dtype)
        span = 1 if weight is None else self.pattern.span(weight.shape, weight.input_axis)
        for start, stop in chunks(flat.numel(), span):
            if weight is None:
                flat[start:stop] = self._state(name, None, start, stop)
            else:
                flat[start:stop] = self._sparse(weight, start, stop).to(spec.dtype) + 0.0  # small ones became -0.0
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
        """Elements start..stop of what is published as `name`, as in `Checkpoint.slice`."""
        part = self._published[name]
        return self.checkpoint.slice(self._origin[part.of], key, part.start + start, part.start + stop)

    def _kept(self, weight: SparseWeight, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """hard(mask) and the dense weight in fp32 of elements start..stop, whole spans: both (stop - start,)."""
        pattern, shape, axis = self.pattern, weight.shape, weight.input_axis
        part = self._published[weight.name]
        where = (self._origin[part.of], self.released, part.start + start, part.start + stop)
        mask, dense = read_masked(self.checkpoint, *where)
        if not self.finished:
            value_GM = pattern.to_groups(mask if self.formed else dense.abs(), shape, axis)
            return pattern.from_groups(top_n(value_GM, pattern.kept), shape, axis), dense
        kept = mask != 0
        full = bool((members_left(kept, pattern, shape, axis) == pattern.kept).all())
        if not full or not torch.equal(kept.float(), mask):
            raise ValueError(
                f"{self.checkpoint.folder}: {weight.name} is not {pattern} although its mask was "
                f"frozen before step {self.step}; the checkpoint is inconsistent, use another one"
            )
        return kept, dense

    def _sparse(self, weight: SparseWeight, start: int, stop: int) -> Tensor:
        """hard(mask) * dense in fp32 (design eq. 11) of elements start..stop, dead members exactly +0.0."""
        kept, dense = self._kept(weight, start, stop)
        value = torch.where(kept, dense, 0.0)
        if not self.finished:
            return value * self._scale(weight, start, stop)
        master = self._state(weight.name, None, start, stop)
        if not torch.equal(value.to(master.dtype), master):  # bf16 with bf16_master_weights_and_grads
            raise ValueError(
                f"{self.checkpoint.folder}: the master of {weight.name} is not mask * dense although its mask is "
                "frozen; the checkpoint is inconsistent, use another one"
            )
        return value

    def _scale(self, weight: SparseWeight, start: int, stop: int) -> Tensor:
        """CAST's factors of elements start..stop, folded into the weights when the mask freezes; 1 for none."""
        part = self._published[weight.name]
        real = self._origin[part.of]
        scale = f"{real.rpartition('.')[0]}.{SCALE}"
        if scale not in self.checkpoint.shapes:
            return torch.ones(())
        index, shape = torch.arange(part.start + start, part.start + stop), self.checkpoint.shapes[real]
        output = index // shape[-1] if weight.input_axis == -1 else index % shape[-1]
        return self.checkpoint.weight(scale).float()[output]


def _run_of(described: dict[str, Any], train: object, step: int) -> dict[str, Any]:
    """What `sparsity.json` and a model card say of the run: no paths of this machine; nothing of one from elsewhere."""
    flags, train = described.get("run"), train if isinstance(train, dict) else {}
    if not isinstance(flags, dict):
        return {}
    given: Any = described.get("published")
    name: Callable[[str], str] = str
    if not isinstance(given, dict):  # a run of before, which told hub ids and paths apart no earlier than here
        given, name = flags, published_name
    names = {key: name(given[key]) for key in ("model", "teacher") if isinstance(given.get(key), str)}
    texts = [name(text) for text in given.get("dataset") or [] if isinstance(text, str)]
    kept = {key: flags.get(key) for key in ("seq_length", "global_batch", "learning_rate")}
    scores = train.get("evaluations")
    losses = scores.get("losses") if isinstance(scores, dict) else None
    loss = losses.get(str(step)) if isinstance(losses, dict) else None
    evaluation = None
    if isinstance(scores, dict) and isinstance(loss, float):
        evaluation = {"loss": loss, **{key: scores.get(key) for key in ("sequences", "seq_length")}}
        evaluation["text"] = published_name(str(scores.get("text")))
    return {**names, "dataset": texts, **kept, "tokens": train.get("tokens"), "evaluation": evaluation}
