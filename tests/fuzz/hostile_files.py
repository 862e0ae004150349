"""Files made to do harm: pickles that execute, archives that unpack to much more, safetensors headers that lie."""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.damaged_values import places, rewrite, without_manifest
from tests.fuzz.scene import Mutation, NotApplicable, Scene

BOMB_BYTES = 48 << 20


class Payload:
    """Creates the canary when it is unpickled by anyone who executes."""

    def __init__(self, canary: Path, way: int) -> None:
        self.canary = str(canary)
        self.way = way

    def __reduce__(self) -> Any:
        ways: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (os.system, (f"touch {self.canary}",)),
            (builtins.eval, (f"open({self.canary!r}, 'w')",)),
            (builtins.exec, (f"open({self.canary!r}, 'w').close()",)),
            (subprocess.call, (["touch", self.canary],)),
            (open, (self.canary, "w")),
            (torch.save, ({}, self.canary)),
            (os.makedirs, (self.canary,)),
        ]
        return ways[self.way % len(ways)]


def _payload(scene: Scene) -> Payload:
    return Payload(scene.canary, scene.rng.randrange(7))


def _unlisted(scene: Scene) -> None:
    """Hostile files come without a manifest more often than not."""
    if scene.rng.random() < 0.7:
        without_manifest(scene)


def hostile_file(scene: Scene) -> None:
    path = scene.pick_pt()
    _unlisted(scene)
    torch.save({"module": _payload(scene)}, path)


def hostile_legacy_file(scene: Scene) -> None:
    """torch's format before zip files: pickles one after the other."""
    path = scene.pick_pt()
    _unlisted(scene)
    torch.save({"module": _payload(scene)}, path, _use_new_zipfile_serialization=False)


def hostile_plain_pickle(scene: Scene) -> None:
    path = scene.pick_pt()
    _unlisted(scene)
    path.write_bytes(pickle.dumps(_payload(scene), protocol=scene.rng.randrange(6)))


def hostile_state(scene: Scene) -> None:
    """Put a hostile object among optimizer states, hyperparameters or client state that are otherwise good."""
    path = scene.pick_pt()
    _unlisted(scene)

    def change(content: Any) -> None:
        holder, key = scene.rng.choice(places(content))
        holder[key] = _payload(scene)

    rewrite(path, change)


def hostile_client_state(scene: Scene) -> None:
    path = scene.pick_pt("*model_states.pt")
    _unlisted(scene)

    def change(content: Any) -> None:
        content[scene.rng.choice(["sparseforge", "train", "extra"])] = {"config": _payload(scene)}

    rewrite(path, change)


def hostile_random_state(scene: Scene) -> None:
    """Put a pickle where a JSON file is expected."""
    scene.pick("random_*.json").write_bytes(pickle.dumps(_payload(scene)))


def hostile_weights_beside(scene: Scene) -> None:
    """`pytorch_model.bin` and friends, which loaders that guess would pick up."""
    folder = scene.rng.choice([scene.folder, *[p for p in scene.folder.iterdir() if p.is_dir()]])
    name = scene.rng.choice(["pytorch_model.bin", "training_args.bin", "adapter_model.bin", "scheduler.pkl"])
    torch.save(_payload(scene), scene.touch(folder / name))


def doubling_lists(scene: Scene) -> None:
    """Lists of lists of the same list: small in the file, 2^60 elements for whoever walks them."""
    nested: list[Any] = [1]
    for _ in range(60):
        nested = [nested, nested]

    def change(content: Any) -> None:
        dicts = [holder for holder, _ in places(content) if isinstance(holder, dict)]
        holder = scene.rng.choice(dicts)
        holder[scene.rng.choice([*holder, "extra"])] = nested

    path = scene.pick_pt()
    _unlisted(scene)
    rewrite(path, change)


def deep_lists(scene: Scene) -> None:
    """Deeper than Python recurses; written by hand, since pickle does not."""
    depth = 50_000
    nested = b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."
    path = scene.pick_pt()
    _unlisted(scene)
    _replace_pickle(path, lambda _: nested, zipfile.ZIP_STORED)


def zip_bomb(scene: Scene) -> None:
    """Write a pickle that unpacks to a thousand times its size."""
    path = scene.pick_pt()
    _unlisted(scene)
    _replace_pickle(path, lambda old: old + bytes(BOMB_BYTES), zipfile.ZIP_DEFLATED)


def compressed_records(scene: Scene) -> None:
    """Compress the same content, as torch never writes it."""
    path = scene.pick_pt()
    _unlisted(scene)
    _replace_pickle(path, lambda old: old, zipfile.ZIP_DEFLATED)


def _replace_pickle(path: Path, change: Callable[[bytes], bytes], compression: int) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", compression) as new:
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(entry.filename, change(content) if entry.filename.endswith("data.pkl") else content)
    path.write_bytes(made.getvalue())


# -- safetensors -------------------------------------------------------------------------------------------------------


def header_length(scene: Scene) -> None:
    path = scene.pick("*.safetensors")
    content = path.read_bytes()
    (right,) = struct.unpack("<Q", content[:8])
    wrong = scene.rng.choice([0, 1, right - 1, right + 8, len(content), 2**31, 2**63, 2**64 - 1])
    path.write_bytes(struct.pack("<Q", wrong) + content[8:])


def header_content(scene: Scene) -> None:
    path = scene.pick("*.safetensors")
    content = path.read_bytes()
    # A safetensors file: the header's length, the header in JSON, the tensors.
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    single = header[scene.rng.choice(names)]
    other = header[scene.rng.choice(names)]
    start, stop = single["data_offsets"]

    def drop_tensor() -> None:
        del header[scene.rng.choice(names)]

    def swap_names() -> None:
        first, second = (scene.rng.choice(names) for _ in range(2))
        if first == second:
            raise NotApplicable
        header[first], header[second] = header[second], header[first]

    # Offsets, shapes, dtypes and names that do not fit, or are of another type.
    changes: list[Callable[[], Any]] = [
        lambda: single.update(data_offsets=[start, stop + 4]),
        lambda: single.update(data_offsets=[stop, start]),
        lambda: single.update(data_offsets=[-start - 1, stop]),
        lambda: single.update(data_offsets=[start, 2**63]),
        lambda: single.update(data_offsets=other["data_offsets"], shape=other["shape"]),
        lambda: single.update(data_offsets=[len(data), len(data) + stop - start]),
        lambda: single.update(shape=[2**62, 4]),
        lambda: single.update(shape=[-1]),
        lambda: single.update(shape=list(reversed(single["shape"]))),
        lambda: single.update(shape=[]),
        lambda: single.update(dtype=scene.rng.choice(["F8_E4M3", "X9", "I32", "F16", "BF16", "BOOL", "U16", "C64"])),
        lambda: single.update(dtype=None),
        lambda: header.update(__metadata__={"format": 7}),
        lambda: header.update({"x" * 3000: dict(single)}),
        drop_tensor,
        swap_names,
    ]
    scene.rng.choice(changes)()
    # A change that left the file as it was is none.
    text = json.dumps(header).encode()
    if struct.pack("<Q", len(text)) + text == content[: 8 + length]:
        raise NotApplicable
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def header_text(scene: Scene) -> None:
    path = scene.pick("*.safetensors")
    text = scene.rng.choice([b"[]", b"{", b"null", b'{"a": 1}', b"\xff" * 16, b"[" * 100_000, b"{}", b" " * 64])
    path.write_bytes(struct.pack("<Q", len(text)) + text)


MUTATIONS: list[Mutation] = [
    hostile_weights_beside,
]
"""Attacks on any folder."""
RUN_MUTATIONS: list[Mutation] = [
    hostile_file,
    hostile_legacy_file,
    hostile_plain_pickle,
    hostile_state,
    hostile_state,
    hostile_client_state,
    hostile_random_state,
    doubling_lists,
    deep_lists,
    zip_bomb,
    compressed_records,
]
"""Attacks on a run."""
SAFETENSORS_MUTATIONS: list[Mutation] = [
    header_length,
    header_content,
    header_content,
    header_text,
]
"""Attacks on a folder with safetensors."""
