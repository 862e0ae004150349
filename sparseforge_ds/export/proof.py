"""Is an export what it must be? Asked in fresh processes, before an export reports success.

`hf` and `packed24`: one process fills a model from the source (`reference`), another loads the exported folder by
`from_pretrained`, for `hf` without our package (`loaded`), both without network and without a GPU. The logits of the
same tokens must be equal bit by bit, and the loader must report nothing missing, unexpected or mismatched; where the
source has a low-rank branch, `from_pretrained` must have loaded it too, and the logits with it must be those of our own
branch, up to the order of sums. `adapter`: the same, of the adapter that peft puts on the source's model.
One model is in memory at a time.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from sparseforge_ds.checkpoint.folder import read_json
from sparseforge_ds.checkpoint.tensors import TensorFolder, tensor_bytes
from sparseforge_ds.export.source import Source
from sparseforge_ds.model.registration import OWN_FAMILIES

TOKENS = 16
"""Length of the text whose logits are compared."""

TOLERANCE = 1e-5
"""Of the largest logit, in fp32: how far peft's way of adding the branch may be from ours."""

_LIBRARIES = 600 * 10**6
"""Bytes of a process with torch and transformers and no model."""


def require(source: Source) -> None:
    """Raise where the proof of this source's exports cannot be done, before anything is written."""
    _require_memory(source, bool(source.branches))
    if source.branches:
        _require_peft()


def _require_memory(source: Source, adapter: bool) -> None:
    width = 4 if adapter else 0
    model = sum(spec.nbytes // spec.dtype.itemsize * max(width, spec.dtype.itemsize) for spec in source.specs.values())
    largest = max((spec.nbytes for spec in source.specs.values()), default=0)
    if adapter:
        model += sum(spec.nbytes for spec in source.specs.values())  # while it is converted
    need, free = model + 4 * largest + _LIBRARIES, available_memory()
    if need > free:
        raise ValueError(
            f"the proof loads the whole model: it needs about {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are "
            "available; free some, or give --skip_proof and prove it on a larger machine"
        )


def _require_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ValueError("the adapter's proof needs peft: pip install 'sparseforge_ds[peft]', or give --skip_proof")


def available_memory() -> int:
    """Bytes that a new process can take: of the machine, and of the container if there is a limit."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return free if limit == "max" else min(free, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return free


def prove_folder(source: Source, folder: Path, plain: bool) -> dict[str, Any]:
    """Load `folder` and compare its logits with those of the source: bit by bit, with an adapter within `TOLERANCE`.

    Args:
        source: what `folder` was made from; it is opened again by the other process.
        plain: load it without our package, if transformers has the family's classes.

    Returns:
        What `sparsity.json` says of it.

    Raises:
        ValueError: they differ, or the folder does not load cleanly.
    """
    with tempfile.TemporaryDirectory(prefix="sparseforge-proof-") as scratch:
        _reference(source, Path(scratch), adapter=None)
        own = source.model_config.get("model_type") in OWN_FAMILIES
        plain = plain and not own
        first = "" if plain else "import sparseforge_ds\n"
        first += "sparseforge_ds.register_families()\n" if own else ""
        text = first + Path(__file__).with_name("loaded.py").read_text()
        answer = Path(scratch) / "loaded"
        _run(["-c", text, str(folder.absolute()), str(answer), str(TOKENS)], scratch, folder, ours=not plain)
        told = read_json(answer.with_suffix(".json"))
        odd = {kind: names for kind, names in told["report"].items() if names}
        if odd:
            kind, names = next(iter(odd.items()))
            raise ValueError(f"{folder}: the proof failed: transformers reports {kind} {names[0]} as it loads it")
        if plain and told["imported"]:
            raise ValueError(f"{folder}: the proof failed: {told['imported'][0]} was imported to load it")
        expected = TensorFolder(scratch, "reference").read("logits")
        found = TensorFolder(scratch, "loaded").read("logits")
        if found.dtype != expected.dtype or tensor_bytes(found) != tensor_bytes(expected):
            worst = (found.float() - expected.float()).abs().max().item() if found.shape == expected.shape else "shapes"
            raise ValueError(f"{folder}: the proof failed: its logits differ from the source's (by up to {worst})")
        if not bool(torch.isfinite(found).all()):
            raise ValueError(f"{folder}: the proof failed: its logits are not finite in {found.dtype}")
        by = "transformers" if plain else "transformers with sparseforge_ds"
        proof = {
            "logits": "bit-equal",
            "class": told["class"],
            "tokens": TOKENS,
            "loaded_by": by,
            "versions": _versions("torch", "transformers"),
        }
        if source.branches:
            if "adapted" not in TensorFolder(scratch, "loaded").specs:
                raise ValueError(f"{folder}: the proof failed: transformers did not load its low-rank adapter")
            proof["adapter"] = _adapter_proof(scratch, TensorFolder(scratch, "loaded").read("adapted"), folder, by)
    return proof


def prove_adapter(source: Source, adapter: Path) -> dict[str, Any]:
    """Put `adapter` on the source's model by peft, and compare with our own branch, in fp32.

    Returns:
        What `sparsity.json` says of it.

    Raises:
        ValueError: the logits differ by more than `TOLERANCE` of the largest.
    """
    with tempfile.TemporaryDirectory(prefix="sparseforge-proof-") as scratch:
        _reference(source, Path(scratch), adapter)
        return _adapter_proof(scratch, TensorFolder(scratch, "reference").read("peft"), adapter, "peft")


def _adapter_proof(scratch: str, found: Tensor, about: Path, by: str) -> dict[str, Any]:
    """Compare logits with an adapter with those of the source's own branch."""
    ours, without = (TensorFolder(scratch, "reference").read(name) for name in ("ours", "without"))
    scale = ours.abs().max().item()
    error, effect = (found - ours).abs().max().item() / scale, (ours - without).abs().max().item() / scale
    if not error <= TOLERANCE:
        raise ValueError(f"{about}: the proof failed: with peft its logits differ by {error:.2g} of the largest")
    return {
        "logits": f"within {TOLERANCE} of the largest, fp32",
        "difference": error,
        "effect": effect,
        "tokens": TOKENS,
        "loaded_by": by,
        "versions": _versions("torch", "transformers", "peft"),
    }


def _reference(source: Source, scratch: Path, adapter: Path | None) -> None:
    """reference.safetensors in `scratch`."""
    path, model, dtype = source.opened
    request = {
        "path": str(path.absolute()),
        "model": None if model is None else str(model.absolute()),
        "dtype": dtype,
        "adapter": None if adapter is None else str(adapter.absolute()),
        "tokens": TOKENS,
    }
    (scratch / "request.json").write_text(json.dumps(request))
    arguments = ["-m", "sparseforge_ds.export.reference", str(scratch / "request.json")]
    _run(arguments, str(scratch), adapter or path, ours=True)


def _run(arguments: list[str], cwd: str, about: Path, ours: bool) -> None:
    """A fresh interpreter without network and GPU, in an empty folder."""
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
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=environment)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1].removeprefix("error: ") if lines else f"exit code {done.returncode}"
        if done.returncode < 0:
            last = f"killed by signal {-done.returncode} (9 is what a machine out of memory sends)"
        raise ValueError(f"{about}: the proof failed: {last[:1000]}")


def _versions(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}
