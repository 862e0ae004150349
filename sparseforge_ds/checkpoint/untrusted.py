"""Limits on the content of a checkpoint file, which comes from elsewhere and is not trusted.

`weights_only` keeps code out, but not content that lies about its size or has no bytes: a list that contains itself
many times over, a tensor that is one number expanded to terabytes, sparse, quantized or meta tensors.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_DEPTH = 64
"""Most levels of nested dicts and lists; DeepSpeed nests six."""
MAX_VALUES = 50_000_000
"""Most values in a file, counted as often as they are reached."""


class RefusedContentError(ValueError):
    """Reason to refuse a file, without its path."""


def check_records(path: Path) -> None:
    """Refuse an archive that torch would map wrongly, or that was saved under another name.

    torch maps the bytes of a record as they are, so a compressed one would become a wrong tensor; torch never
    compresses. It also writes the file's name into the archive, which tells the files of two ranks apart.

    Raises:
        RefusedContentError: the archive is not one that torch wrote under this name; the message has no path.
    """
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1 for record in records):
        raise RefusedContentError("refused, its records are compressed or encrypted, which torch never does")
    names = {record.filename for record in records}
    if len(names) != len(records):
        raise RefusedContentError("refused, it holds two records of one name")
    saved_as = {name.partition("/")[0] for name in names}
    if len(saved_as) != 1:
        raise RefusedContentError("refused, it holds records of more than one file")
    (stem,) = saved_as
    if stem.endswith("_states") and stem != path.stem:
        raise RefusedContentError(
            f"is the file that was saved as {stem[:100]}.pt, under another name; use another checkpoint"
        )


def check_content(content: Any) -> None:
    """Refuse objects that are not plain checkpoint content, or that expand beyond the file's size.

    Raises:
        RefusedContentError: some object is refused; the message has no path.
    """
    sizes: dict[int, int] = {}
    _measure(content, sizes, 0)


def _measure(value: Any, sizes: dict[int, int], depth: int) -> int:
    """Return the number of values in `value`, itself included; `sizes` holds those of containers seen before, by id."""
    if isinstance(value, Tensor):
        _check_tensor(value)
        return 1
    if not isinstance(value, (dict, list, tuple, set)):
        return 1
    if (known := sizes.get(id(value))) is not None:
        return known
    if depth == MAX_DEPTH:
        raise RefusedContentError(f"refused, it nests more than {MAX_DEPTH} levels deep")
    inner = value.values() if isinstance(value, dict) else value
    size = 1 + sum(_measure(item, sizes, depth + 1) for item in inner)
    if size > MAX_VALUES:
        raise RefusedContentError(f"refused, it unfolds to more than {MAX_VALUES:,} values")
    sizes[id(value)] = size
    return size


def _check_tensor(tensor: Tensor) -> None:
    """Refuse a tensor that is not plain numbers in memory, or whose storage is smaller than its shape."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
    if not plain or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
        raise RefusedContentError(
            f"refused, it holds a tensor that is not plain numbers ({tensor.layout}, {tensor.device})"
        )
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise RefusedContentError(f"refused, it holds a tensor of {tensor.numel():,} elements with fewer in the file")
