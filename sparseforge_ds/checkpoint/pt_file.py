"""One `.pt` file of a checkpoint, read without executing what is inside.

Checkpoints come from elsewhere and are not trusted: files are opened with `torch.load(weights_only=True)`. The three
DeepSpeed classes that appear in them are replaced by inert stand-ins, so DeepSpeed need not even be installed, and any
other class is refused by name. Tensors are memory-mapped: opening a file of 100 GB costs milliseconds.
"""

from __future__ import annotations

import io
import pickle
import re
import threading
import zipfile
from pathlib import Path
from typing import Any

import torch

from sparseforge_ds.checkpoint.untrusted import RefusedContentError, check_content, check_records


class _Stage(int):
    """Stand-in of DeepSpeed's ZeroStageEnum."""


def _member(kind: object, name: object) -> _Stage:
    """Return a member of ZeroStageEnum; stand-in of getattr, which Python before 3.11.4 pickles for such a member.

    Debian 12 has 3.11.2.
    """
    if kind is not _Stage or name not in _STAGES:
        raise RefusedContentError(
            f"refused, it takes {str(name)[:100]!r} of {kind!r:.100}, which no DeepSpeed checkpoint does"
        )
    return _Stage(_STAGES.index(name))


_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
"""Names of ZeRO's stages, as DeepSpeed has them."""


class _Attributes:
    """Stand-in of DeepSpeed's small state objects: attributes and nothing else."""


_STAND_INS: list[Any] = [
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_member, "builtins.getattr"),
    (_Attributes, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Attributes, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Attributes, "deepspeed.utils.tensor_fragment.fragment_address"),
]

_UNREADABLE = (
    OSError,
    EOFError,
    RuntimeError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    AssertionError,
)
"""Errors of torch.load on damaged bytes, depending on where in the file the damage is."""

_GLOBAL = re.compile(r"nsupported (?:global: )?GLOBAL ([\w.]+)")
"""Pattern of torch's message about a class that it refuses."""
_OPENING = threading.Lock()
"""Lock of all loads: the list of classes that torch accepts belongs to the process."""


def why_unreadable(value: object) -> str | None:
    """Return why `PtFile` could not read a checkpoint with `value` in it; None if it could."""
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        with _OPENING, torch.serialization.safe_globals(_STAND_INS):
            check_content(torch.load(content, map_location="cpu", weights_only=True))
    except (pickle.PicklingError, *_UNREADABLE) as error:
        refused_class = _GLOBAL.search(str(error))
        if refused_class:
            return f"it has a {refused_class[1]} in it"
        return str(error).strip().partition("\n")[0][:200]
    return None


class PtFile:
    """A checkpoint file, opened when first needed; any number of threads may ask for its content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content: dict[str, Any] | None = None

    @property
    def content(self) -> dict[str, Any]:
        """Saved dict, whose tensors are views of the mapped file."""
        content = self._content
        if content is None:
            with _OPENING:
                content = self._content
                if content is None:
                    content = self._content = self._load()
        return content

    def release(self) -> None:
        """Unmap the file (once no tensor of it is in use); the next access opens it again."""
        self._content = None

    def check_bytes(self) -> None:
        """Read the whole file; raise ValueError if the checksum of a tensor in it is wrong."""
        try:
            check_records(self.path)
            with zipfile.ZipFile(self.path) as archive:
                damaged = archive.testzip()
        except RefusedContentError as error:
            raise ValueError(f"{self.path}: {error}") from None
        except (OSError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"{self.path}: {self._cure(error)}") from None
        if damaged is not None:
            raise ValueError(
                f"{self.path}: checksum of {damaged} is wrong, the file is damaged; use another checkpoint"
            )

    def _load(self) -> dict[str, Any]:
        """Map the file and check its content."""
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file; the checkpoint is incomplete, use another one")
        try:
            check_records(self.path)
            with torch.serialization.safe_globals(_STAND_INS):
                content = torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
            check_content(content)
        except RefusedContentError as error:
            raise ValueError(f"{self.path}: {error}") from None
        except _UNREADABLE as error:
            raise ValueError(f"{self.path}: {self._cure(error)}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{self.path}: holds a {type(content).__name__}, not a DeepSpeed checkpoint")
        return content

    def _cure(self, error: BaseException) -> str:
        """Return what an error of torch or zipfile means, and what to do."""
        text = str(error)
        if match := _GLOBAL.search(text):
            return f"refused, it refers to {match[1]}, which no DeepSpeed checkpoint does; nothing was executed"
        if isinstance(error, pickle.UnpicklingError):
            reason = re.sub(r"(?s).*?WeightsUnpickler error: ", "", text).strip() or type(error).__name__
            return f"refused, it is not made of plain tensors and values ({reason.splitlines()[0][:200]})"
        reason = text.splitlines()[0][:200] if text else type(error).__name__
        return f"not a readable checkpoint file, truncated or damaged ({reason}); use another checkpoint"
