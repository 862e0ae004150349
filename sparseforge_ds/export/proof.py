"""Proof that an exported folder is the model of its source, before an export reports success.

A model is filled from the source (`reference`). Then a fresh process loads the folder by `from_pretrained` (`loaded`),
without network and GPU, and for `hf` without our package. The logits of the same tokens must be equal bit by bit, and
the loader must report nothing missing, unexpected or mismatched. The adapter of an `hf` folder is compared with the
source's low-rank branch up to the order of sums. One model is in memory at a time.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.checkpoint.tensors import TensorFolder, tensor_bytes
from sparseforge_ds.export.free_memory import free_memory
from sparseforge_ds.export.reference import reference_logits
from sparseforge_ds.export.source import Source
from sparseforge_ds.model.registration import OWN_FAMILIES, load_config, model_class
from sparseforge_ds.packed_format.packed_values import Grid
from sparseforge_ds.packed_format.packing import PACKED24_MODULE

TOKENS = 16
"""Tokens whose logits are compared."""

TOLERANCE = 1e-5
"""Largest difference of logits with peft's adapter and our branch, in fp32, as a share of the largest logit."""

_IMPORTS = "import gc\ngc.disable()\nimport transformers.modeling_utils\ngc.enable()\n"
"""Imports of `from_pretrained`, which are faster without garbage collection (as in `cli/imports.py`)."""

_LIBRARIES = 600 * 10**6
"""Bytes of a process with torch and transformers and no model."""


def require_provable(source: Source, packed: bool) -> None:
    """Raise ValueError if this machine cannot do the proof of an export, before anything is written."""
    # The model, and about four copies of the largest tensor while it is read.
    specs = source.specs.values()
    need = _LIBRARIES + sum(spec.nbytes for spec in specs) + 4 * max((spec.nbytes for spec in specs), default=0)
    if source.branches:  # the model is cast to fp32
        need += sum(spec.nbytes // spec.dtype.itemsize * max(4, spec.dtype.itemsize) for spec in specs)
    if need > (free := free_memory()):
        raise ValueError(
            f"the proof loads the whole model: it needs about {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are "
            "available; free some, or give --skip_proof and prove it on a larger machine"
        )
    if source.branches and not packed and importlib.util.find_spec("peft") is None:
        raise ValueError("the adapter's proof needs peft: in the checkout pip install '.[peft]', or give --skip_proof")


def prove_folder(source: Source, folder: Path, plain: bool, grid: Grid | None = None) -> dict[str, Any]:
    """Load `folder` in a fresh process, and compare its logits with those of the source.

    Args:
        source: that the folder was exported from.
        folder: the exported one.
        plain: True to load it without our package, if transformers has the family's classes.
        grid: to which its 2:4 weights were rounded; those of the source are rounded alike.

    Returns:
        The content of `proof` in `sparsity.json`.

    Raises:
        ValueError: the logits differ, or the folder does not load cleanly.
    """
    with tempfile.TemporaryDirectory(prefix="sparseforge-proof-") as scratch:
        try:
            reference = reference_logits(source, TOKENS, grid)
        except ValueError as error:
            raise _failed(source.model_folder, str(error)) from None
        save_file({"ids": reference["ids"]}, Path(scratch, "tokens.safetensors"))
        # A fresh process loads the folder, with our package only where it is needed.
        is_own_family = source.model_config.get("model_type") in OWN_FAMILIES
        by_peft = plain and bool(source.branches)
        without_ours = plain and not is_own_family
        script = _IMPORTS if plain else _IMPORTS + f"import {PACKED24_MODULE}\n"
        script += "import sparseforge_ds\nsparseforge_ds.register_model_classes()\n" if is_own_family else ""
        script += Path(__file__).with_name("loaded.py").read_text()
        name = model_class(load_config(source.model_folder, str(source.model_folder))).__name__
        _run(script, [str(folder.absolute()), name], folder, scratch, ours=not without_ours)
        # The loader complains of nothing.
        loading = read_json_object(Path(scratch) / "loaded.json")
        for kind, names in loading["report"].items():
            if names:
                raise _failed(folder, f"transformers reports {kind} {names[0]} as it loads it")
        if without_ours and loading["imported"]:
            raise _failed(folder, f"{loading['imported'][0]} was imported to load it")
        # The logits are equal bit by bit.
        loaded = TensorFolder(scratch, "loaded")
        expected = reference["branched" if source.branches and not by_peft else "logits"]
        logits = loaded.read("logits")
        if logits.dtype != expected.dtype or tensor_bytes(logits) != tensor_bytes(expected):
            same_shape = logits.shape == expected.shape
            largest = (logits.float() - expected.float()).abs().max().item() if same_shape else "shapes"
            raise _failed(folder, f"its logits differ from the source's (by up to {largest})")
        if not bool(torch.isfinite(logits).all()):
            raise _failed(folder, f"its logits are not finite in {logits.dtype}")
        proof = {
            "logits": "bit-equal",
            "class": loading["class"],
            "tokens": TOKENS,
            "loaded_by": "transformers" if without_ours else "transformers with sparseforge_ds",
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        }
        # An adapter adds the branch in another order of sums.
        if by_peft:
            if "adapted" not in loaded.specs:
                raise _failed(folder, "transformers did not load its low-rank adapter")
            proof["adapter"] = _compare_adapted(reference, loaded, folder)
    return proof


def _compare_adapted(reference: dict[str, Tensor], loaded: TensorFolder, folder: Path) -> dict[str, Any]:
    """Compare logits with the adapter with those of the source's own branch, and return both kinds of distances."""
    branched = reference["branched_fp32"]
    scale = branched.abs().max().item()
    error = (loaded.read("adapted") - branched).abs().max().item() / scale
    effect = (branched - reference["logits_fp32"]).abs().max().item() / scale
    if not error <= TOLERANCE:
        raise _failed(folder, f"with peft its logits differ by {error:.2g} of the largest")
    return {
        "logits": f"within {TOLERANCE} of the largest, fp32",
        "difference": error,
        "effect": effect,
        "versions": {"peft": importlib.metadata.version("peft")},
    }


def _run(script: str, arguments: list[str], folder: Path, scratch: str, ours: bool) -> None:
    """Run a script in a fresh interpreter without network and GPU.

    Args:
        script: its text.
        arguments: of the script.
        folder: the exported one, for messages.
        scratch: working folder.
        ours: True if the script may import our package.
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if ours:
        package = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, environment.get("PYTHONPATH"))))
    # Its last line tells what was wrong.
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, cwd=scratch, env=environment)
    if process.returncode < 0:
        raise _failed(folder, f"killed by signal {-process.returncode} (9 is what a machine out of memory sends)")
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        last = lines[-1].removeprefix("error: ") if lines else f"exit code {process.returncode}"
        raise _failed(folder, last[:1000])


def _failed(folder: Path, cause: str) -> ValueError:
    return ValueError(f"{folder}: the proof failed: {cause}")
