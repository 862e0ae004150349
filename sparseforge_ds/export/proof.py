"""Is an exported folder the model that it must be? Asked before an export reports success.

A model is filled from the source (`reference`); then a fresh process loads the folder by `from_pretrained` (`loaded`),
for `hf` without our package, without network and without a GPU. The logits of the same tokens must be equal bit by bit,
and the loader must report nothing missing, unexpected or mismatched. With a low-rank branch that holds for `packed24`;
an `hf` folder's adapter is held against the branch up to the order of sums. One model is in memory at a time.
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

from sparseforge_ds.checkpoint.folder import read_json
from sparseforge_ds.checkpoint.tensors import TensorFolder, tensor_bytes
from sparseforge_ds.export.free_memory import free_memory
from sparseforge_ds.export.reference import reference_logits
from sparseforge_ds.export.source import Source
from sparseforge_ds.mask.packing import PACKED24_MODULE
from sparseforge_ds.model.registration import OWN_FAMILIES, load_config, model_class

TOKENS = 16

TOLERANCE = 1e-5
"""Of the largest logit, in fp32: how far peft's way of adding the branch may be from ours."""

_IMPORTS = "import gc\ngc.disable()\nimport transformers.modeling_utils\ngc.enable()\n"
"""What `from_pretrained` needs, without collections of garbage meanwhile (as `cli/imports.py` does it)."""

_LIBRARIES = 600 * 10**6
"""Bytes of a process with torch and transformers and no model."""


def require(source: Source, packed: bool) -> None:
    """Raise where the proof of an export of this source cannot be done, before anything is written."""
    specs = source.specs.values()
    need = _LIBRARIES + sum(spec.nbytes for spec in specs) + 4 * max((spec.nbytes for spec in specs), default=0)
    if source.branches:  # a copy in fp32
        need += sum(spec.nbytes // spec.dtype.itemsize * max(4, spec.dtype.itemsize) for spec in specs)
    if need > (free := free_memory()):
        raise ValueError(
            f"the proof loads the whole model: it needs about {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are "
            "available; free some, or give --skip_proof and prove it on a larger machine"
        )
    if source.branches and not packed and importlib.util.find_spec("peft") is None:
        raise ValueError("the adapter's proof needs peft: pip install 'sparseforge_ds[peft]', or give --skip_proof")


def prove_folder(source: Source, folder: Path, plain: bool) -> dict[str, Any]:
    """Load `folder` and compare its logits with those of the source: bit by bit, with an adapter within `TOLERANCE`.

    It is loaded without our package where `plain` asks for that and transformers has the family's classes. Raises
    ValueError where the logits differ, or the folder does not load cleanly. Returns what `sparsity.json` says of it.
    """
    with tempfile.TemporaryDirectory(prefix="sparseforge-proof-") as scratch:
        try:
            reference = reference_logits(source, TOKENS)
        except ValueError as error:
            raise _failed(source.model_folder, str(error)) from None
        save_file({"ids": reference["ids"]}, Path(scratch, "tokens.safetensors"))
        own = source.model_config.get("model_type") in OWN_FAMILIES
        packed = not plain
        by_peft, plain = plain and bool(source.branches), plain and not own
        first = _IMPORTS + (f"import {PACKED24_MODULE}\n" if packed else "")
        first += "import sparseforge_ds\nsparseforge_ds.register_model_classes()\n" if own else ""
        text = first + Path(__file__).with_name("loaded.py").read_text()
        name = model_class(load_config(source.model_folder, str(source.model_folder), cached=True)).__name__
        _run(text, [str(folder.absolute()), name], folder, scratch, ours=not plain)
        told = read_json(Path(scratch) / "loaded.json")
        for kind, names in told["report"].items():
            if names:
                raise _failed(folder, f"transformers reports {kind} {names[0]} as it loads it")
        if plain and told["imported"]:
            raise _failed(folder, f"{told['imported'][0]} was imported to load it")
        loaded = TensorFolder(scratch, "loaded")
        expected = reference["branched" if source.branches and not by_peft else "logits"]
        found = loaded.read("logits")
        if found.dtype != expected.dtype or tensor_bytes(found) != tensor_bytes(expected):
            worst = (found.float() - expected.float()).abs().max().item() if found.shape == expected.shape else "shapes"
            raise _failed(folder, f"its logits differ from the source's (by up to {worst})")
        if not bool(torch.isfinite(found).all()):
            raise _failed(folder, f"its logits are not finite in {found.dtype}")
        proof = {
            "logits": "bit-equal",
            "class": told["class"],
            "tokens": TOKENS,
            "loaded_by": "transformers" if plain else "transformers with sparseforge_ds",
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        }
        if by_peft:
            if "adapted" not in loaded.specs:
                raise _failed(folder, "transformers did not load its low-rank adapter")
            proof["adapter"] = _compare_adapted(reference, loaded, folder)
    return proof


def _compare_adapted(reference: dict[str, Tensor], loaded: TensorFolder, folder: Path) -> dict[str, Any]:
    """Logits with the adapter against those of the source's own branch."""
    ours, without, found = reference["ours"], reference["without"], loaded.read("adapted")
    scale = ours.abs().max().item()
    error, effect = (found - ours).abs().max().item() / scale, (ours - without).abs().max().item() / scale
    if not error <= TOLERANCE:
        raise _failed(folder, f"with peft its logits differ by {error:.2g} of the largest")
    return {
        "logits": f"within {TOLERANCE} of the largest, fp32",
        "difference": error,
        "effect": effect,
        "versions": {"peft": importlib.metadata.version("peft")},
    }


def _run(text: str, arguments: list[str], folder: Path, scratch: str, ours: bool) -> None:
    """Run `text` on a folder in a fresh interpreter without network and GPU."""
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
    command = [sys.executable, "-c", text, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=scratch, env=environment)
    if done.returncode < 0:
        raise _failed(folder, f"killed by signal {-done.returncode} (9 is what a machine out of memory sends)")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1].removeprefix("error: ") if lines else f"exit code {done.returncode}"
        raise _failed(folder, last[:1000])


def _failed(about: Path, why: str) -> ValueError:
    return ValueError(f"{about}: the proof failed: {why}")
