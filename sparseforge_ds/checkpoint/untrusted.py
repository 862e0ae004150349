"""What the content of a checkpoint file may be made of, after unpickling has executed nothing.

`weights_only` keeps code out, but not content that lies about its size or has no bytes: a list that contains itself
many times over, a tensor that is one number expanded to terabytes, sparse, quantized or meta tensors.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEEPEST = 64
"""Levels of dicts and lists; DeepSpeed nests six."""
MOST = 50_000_000
"""Values, counted as often as they are reached."""


class Refused(ValueError):
    """Why a file is refused, without its path."""


def check_records(path: Path) -> None:
    """Refuse an archive that torch would map wrongly, or that was saved under another name.

    torch maps the bytes of a record as they are, so a compressed one would become a wrong tensor; torch never
    compresses. And it writes the name of the file into the archive, which tells two ranks' files apart. Raises Refused,
    whose message has no path.
    """
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1 for record in records):
        raise Refused("refused, its records are compressed or encrypted, which torch never does")
    names = {record.filename for record in records}
    if len(names) != len(records):
        raise Refused("refused, it holds two records of one name")
    saved_as = {name.partition("/")[0] for name in names}
    if len(saved_as) != 1:
        raise Refused("refused, it holds records of more than one file")
    (stem,) = saved_as
    if stem.endswith("_states") and stem != path.stem:
        raise Refused(f"is the file that was saved as {stem[:100]}.pt, under another name; use another checkpoint")


def check_content(content: Any) -> None:
    """Refuse what no checkpoint holds and what would cost more memory or time than the file has bytes. Raises Refused,
    whose message has no path."""
    sizes: dict[int, int] = {}
    _measure(content, sizes, 0)


def _measure(value: Any, sizes: dict[int, int], depth: int) -> int:
    """Values in `value`, itself included; of a container that was measured before, what was found then."""
    if isinstance(value, Tensor):
        _check_tensor(value)
        return 1
    if not isinstance(value, (dict, list, tuple, set)):
        return 1
    if (known := sizes.get(id(value))) is not None:
        return known
    if depth == DEEPEST:
        raise Refused(f"refused, it nests more than {DEEPEST} levels deep")
    inner = value.values() if isinstance(value, dict) else value
    size = 1 + sum(_measure(item, sizes, depth + 1) for item in inner)
    if size > MOST:
        raise Refused(f"refused, it unfolds to more than {MOST:,} values")
    sizes[id(value)] = size
    return size


def _check_tensor(tensor: Tensor) -> None:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
    if not plain or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
        raise Refused(f"refused, it holds a tensor that is not plain numbers ({tensor.layout}, {tensor.device})")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise Refused(f"refused, it holds a tensor of {tensor.numel():,} elements with fewer in the file")
