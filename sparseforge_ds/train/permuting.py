"""The order of the student's channels: found by rank 0 before the run, kept in its folder, the same on every rank."""

from __future__ import annotations

import logging
import shutil

import torch
from deepspeed.accelerator import get_accelerator

from sparseforge_ds.checkpoint.folder import read_json
from sparseforge_ds.config import PermuteConfig
from sparseforge_ds.data.batches import Batches
from sparseforge_ds.export.permuted_folder import DenseFolder
from sparseforge_ds.model.permutation_record import FOLDER, Permutation
from sparseforge_ds.model.pretrained import empty_model, load_model
from sparseforge_ds.permutation.activations import find_by_activations
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train.spec import RunSpec

_LOG = logging.getLogger(__name__)


def settle_permutation(spec: RunSpec, ranks: Ranks, batches: Batches) -> Permutation | None:
    """The permutation of this run: found now, or read where the run continues; None without `permute`. Collective.

    Raises:
        AgreedError: the run continues, and its permutation is not there; or a weight cannot be read.
    """
    settings = spec.config.permute
    if settings is None:
        return None
    if spec.arguments.resume:
        return ranks.on_first(lambda: _saved(spec))
    batches.prepare(0, settings.sequences)
    return ranks.on_first(lambda: _found(spec, settings, batches))


def keep_permutation(spec: RunSpec) -> str | None:
    """Have the order of the student's channels in the run's folder, also that of a model which was permuted before.

    Returns:
        Its sha256; None where channels have the order that they were trained in.
    """
    if spec.config.permute is None:  # else it was written when it was found
        of_model = Permutation.load(spec.model.folder)
        if of_model is None:
            shutil.rmtree(spec.folder / FOLDER, ignore_errors=True)
        elif not spec.arguments.resume or not (spec.folder / FOLDER).is_dir():
            of_model.save(spec.folder)
    permutation = Permutation.load(spec.folder)
    return None if permutation is None else permutation.sha256


def check_room(spec: RunSpec, device: torch.device) -> None:
    """Raise a ValueError where rank 0 cannot hold the whole model, as scores by activations need."""
    needed = sum(p.numel() for p in empty_model(spec.model).parameters()) * spec.dtype.itemsize
    free = get_accelerator().available_memory()
    if needed > free:
        raise ValueError(
            f'permute.score = "activations": rank 0 loads the whole model, {needed / 2**30:.1f} GiB, and {device} has '
            f'{free / 2**30:.1f} GiB free; use "score": "magnitude", which reads one weight at a time, or permute the '
            "model before the run (sparseforge permute)"
        )


def _saved(spec: RunSpec) -> Permutation:
    permutation = Permutation.load(spec.folder)
    if permutation is None:
        raise ValueError(
            f"--resume: {spec.folder} has no {FOLDER}, in whose order its weights are; bring it back, or start in a "
            "new --output_dir"
        )
    if permutation.sha256 != read_json(spec.folder / "sparseforge.json").get("permutation"):
        raise ValueError(
            f"--resume: {spec.folder / FOLDER} is not the one in whose order the weights of the run are; bring it "
            "back, or start in a new --output_dir"
        )
    return permutation


def _found(spec: RunSpec, settings: PermuteConfig, batches: Batches) -> Permutation:
    device = torch.device(get_accelerator().current_device_name())
    if settings.score == "magnitude":
        empty = empty_model(spec.model)
        shapes = {name: tuple(parameter.shape) for name, parameter in empty.named_parameters()}
        found = DenseFolder(spec.model.folder).find(spec.config, shapes, device)
    else:
        check_room(spec, device)
        windows = (batches.window(i)[None] for i in range(settings.sequences))
        loaded = load_model(spec.model.folder, f"--model {spec.model.name}", spec.dtype, None)
        model = loaded.to(device)  # type: ignore[arg-type]
        found = find_by_activations(model, windows, spec.config)
        del model, loaded
        get_accelerator().empty_cache()  # a whole model was there, and NCCL allocates for itself
    found.save(spec.folder)
    for part, kept in found.facts["kept"].items():
        _LOG.info(
            "permuted %s: %s keeps %.2f%% of the score, %.2f%% before",
            part,
            spec.config.pattern,
            100 * kept["after"],
            100 * kept["before"],
        )
    return found
