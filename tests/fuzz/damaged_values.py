"""Wrong types and values in JSON files and in the content of `.pt` files whose checksums are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sparseforge_ds.packed_format.packed_values import SCALE
from tests.fuzz.scene import Mutation, NotApplicable, Scene

NOT_FINITE = [float("nan"), float("inf"), float("-inf")]

Place = tuple[Any, Any]
"""A container, and the key or index of one of its values."""

WRONG: list[Any] = [
    None,
    [],
    {},
    "",
    "x",
    "../../etc/passwd",
    "\ud800",
    -1,
    0,
    10**30,
    2**63,
    1e308,
    float("nan"),
    float("inf"),
    True,
    [[]],
    {"a": 1},
    "9" * 5000,
]


def places(content: Any) -> list[Place]:
    """Return the place of every value inside of nested dicts and lists."""
    results: list[Place] = []
    stack = [content]
    while stack:
        holder = stack.pop()
        keys = holder.keys() if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            results.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                stack.append(holder[key])
    return results


def _wrong(scene: Scene, value: Any) -> Any:
    return scene.rng.choice([other for other in WRONG if type(other) is not type(value) or other != value])


# -- JSON --------------------------------------------------------------------------------------------------------------


def _json(scene: Scene) -> tuple[Path, Any]:
    path = scene.pick("*.json")
    return path, json.loads(path.read_text())


def json_value(scene: Scene) -> None:
    path, content = _json(scene)
    holder, key = scene.rng.choice(places(content))
    holder[key] = _wrong(scene, holder[key])
    path.write_text(json.dumps(content))


def json_key_removed(scene: Scene) -> None:
    path, content = _json(scene)
    holder, key = scene.rng.choice([position for position in places(content) if isinstance(position[0], dict)])
    del holder[key]
    path.write_text(json.dumps(content))


def json_key_renamed(scene: Scene) -> None:
    path, content = _json(scene)
    holder, key = scene.rng.choice([position for position in places(content) if isinstance(position[0], dict)])
    holder[scene.rng.choice([f"{key}x", "", "__class__"])] = holder.pop(key)
    path.write_text(json.dumps(content))


def json_list_grown(scene: Scene) -> None:
    path, content = _json(scene)
    lists = [holder[key] for holder, key in places(content) if isinstance(holder[key], list)]
    if not lists:
        raise NotApplicable
    grown = scene.rng.choice(lists)
    grown.append(scene.rng.choice([*WRONG, *grown]))
    path.write_text(json.dumps(content))


def json_root(scene: Scene) -> None:
    path, content = _json(scene)
    texts: list[bytes] = [
        b"[]",
        b"null",
        b'"text"',
        b"17",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"step": ' + b"9" * 10_000 + b"}",
        b"\xef\xbb\xbf" + json.dumps(content).encode(),
        json.dumps(content).encode("utf-16"),
        b'{"step": 6} {"step": 7}',
        b"{}",
        b"\xff\xfe\x00",
    ]
    path.write_bytes(scene.rng.choice(texts))


# -- the content of .pt files -----------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Load one of our own files, change it, save it with right checksums."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def _any_pt(scene: Scene) -> Path:
    path = scene.pick_pt()
    if scene.rng.random() < 0.7:
        without_manifest(scene)
    return path


def without_manifest(scene: Scene) -> None:
    """Remove all but DeepSpeed's own files, which is what a loop without our trainer leaves."""
    scene.unlisted = True
    (scene.checkpoint() / "checkpoint.json").unlink(missing_ok=True)
    for file in scene.checkpoint().glob("random_*.json"):
        file.unlink()


def pt_value(scene: Scene) -> None:
    """Another type or value in place of anything that is not a tensor."""

    def change(content: Any) -> None:
        plain = [(h, k) for h, k in places(content) if not isinstance(h[k], torch.Tensor)]
        holder, key = scene.rng.choice(plain)
        holder[key] = _wrong(scene, holder[key])

    rewrite(_any_pt(scene), change)


def pt_key_removed(scene: Scene) -> None:
    def change(content: Any) -> None:
        holder, key = scene.rng.choice([position for position in places(content) if isinstance(position[0], dict)])
        del holder[key]

    rewrite(_any_pt(scene), change)


def pt_list_changed(scene: Scene) -> None:
    def change(content: Any) -> None:
        lists = [h[k] for h, k in places(content) if isinstance(h[k], list) and h[k]]
        if not lists:
            raise NotApplicable
        changed = scene.rng.choice(lists)
        scene.rng.choice([lambda: changed.append(changed[0]), changed.pop, changed.clear])()

    rewrite(_any_pt(scene), change)


def pt_not_a_tensor(scene: Scene) -> None:
    _change_tensor(scene, lambda tensor: scene.rng.choice([None, 1.5, [], "tensor", list(range(3))]))


def pt_tensor_shape(scene: Scene) -> None:
    def change(tensor: torch.Tensor) -> Any:
        flat = tensor.detach().reshape(-1)
        choices: list[Callable[[], Any]] = [
            lambda: flat[:-1].clone(),
            lambda: torch.cat([flat, flat[:1]]),
            lambda: flat[:0].clone(),
            lambda: flat[:1].clone().reshape(()),
            lambda: flat.clone().reshape(1, -1, 1),
            lambda: flat[:1].clone().expand(1 << 20, 1 << 20),
            lambda: flat[:1].clone().expand(1 << 40),
        ]
        return scene.rng.choice(choices)()

    _change_tensor(scene, change)


def pt_tensor_dtype(scene: Scene) -> None:
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.complex64, torch.uint8]
    _change_tensor(scene, lambda tensor: tensor.detach().to(scene.rng.choice([k for k in kinds if k != tensor.dtype])))


def pt_tensor_kind(scene: Scene) -> None:
    def change(tensor: torch.Tensor) -> Any:
        choices: list[Callable[[], Any]] = [
            lambda: tensor.detach().to("meta"),
            lambda: tensor.detach().float().reshape(1, -1).to_sparse(),
            lambda: torch.quantize_per_tensor(tensor.detach().float(), 0.1, 0, torch.qint8),
            lambda: torch.nested.nested_tensor([tensor.detach().reshape(-1)]),
            lambda: tensor.detach().reshape(-1)[::2],
            lambda: torch.conj(torch.complex(tensor.detach().float(), tensor.detach().float())),
            lambda: torch._neg_view(tensor.detach().float()),
        ]
        return scene.rng.choice(choices)()

    _change_tensor(scene, change)


def pt_not_finite(scene: Scene) -> None:
    def change(tensor: torch.Tensor) -> Any:
        if not tensor.is_floating_point():
            raise NotApplicable
        changed = tensor.detach().clone()
        return _with_number(scene, changed, NOT_FINITE)

    _change_tensor(scene, change)


def scale_value(scene: Scene) -> None:
    """Put a number into a scale that no scale has."""
    _change_part(scene, SCALE, lambda scale: _with_number(scene, scale, [0.0, -0.0, -1.0, *NOT_FINITE]))


def scale_form(scene: Scene) -> None:
    """Give scales another dtype or shape, or none of them."""
    choices: list[Callable[[torch.Tensor], torch.Tensor | None]] = [
        lambda scale: scale.half(),
        lambda scale: scale.double(),
        lambda scale: scale[:-1],
        lambda scale: scale.view(-1),
        lambda scale: torch.cat((scale, scale), 1),
        lambda scale: scale[:, :1] if scale.shape[1] > 1 else scale[:, :0],
        lambda scale: None,
    ]
    _change_part(scene, SCALE, scene.rng.choice(choices))


def other_group(scene: Scene) -> None:
    """Let config.json name a group that the scales do not have, or values of another grid."""
    path = scene.touch(scene.folder / "config.json")
    content = json.loads(path.read_text())
    settings = content["quantization_config"]
    group_size = scene.rng.choice([size for size in (None, 16, 32, 48, 64) if size != settings.get("group_size")])
    path.write_text(json.dumps(content | {"quantization_config": settings | {"group_size": group_size}}))


def value_off_the_grid(scene: Scene) -> None:
    """Put -128, -8 or NaN into rounded values, which no export writes."""

    def change(values: torch.Tensor) -> torch.Tensor:
        bits = values.view(torch.uint8)
        bits.view(-1)[scene.rng.randrange(bits.numel())] = {torch.int8: 0x80, torch.uint8: 0x38}.get(values.dtype, 0x7F)
        return values

    _change_part(scene, "", change)


def _with_number(scene: Scene, tensor: torch.Tensor, numbers: list[float]) -> torch.Tensor:
    tensor.view(-1)[scene.rng.randrange(tensor.numel())] = scene.rng.choice(numbers)
    return tensor


def _change_part(scene: Scene, part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Change one part of a random packed weight; `part` is the suffix of its name, and None takes the tensor out."""
    path = scene.touch(scene.rng.choice(sorted(scene.folder.glob("*.safetensors"))))
    tensors = load_file(path)
    weights = [name.removesuffix(SCALE) for name in sorted(tensors) if name.endswith(SCALE)]
    name = scene.rng.choice(weights) + part
    changed = change(tensors.pop(name))
    save_file(tensors | ({} if changed is None else {name: changed}), path, {"format": "pt"})


def _change_tensor(scene: Scene, change: Callable[[torch.Tensor], Any]) -> None:
    def apply(content: Any) -> None:
        tensors = [(h, k) for h, k in places(content) if isinstance(h[k], torch.Tensor) and h[k].numel()]
        if not tensors:
            raise NotApplicable
        holder, key = scene.rng.choice(tensors)
        holder[key] = change(holder[key])

    rewrite(_any_pt(scene), apply)


MUTATIONS: list[Mutation] = [
    json_value,
    json_value,
    json_value,
    json_key_removed,
    json_key_renamed,
    json_list_grown,
    json_root,
]
"""Damage to any folder."""
SCALED_MUTATIONS: list[Mutation] = [
    scale_value,
    scale_form,
    other_group,
    value_off_the_grid,
]
"""Damage to a folder whose values have scales."""
RUN_MUTATIONS: list[Mutation] = [
    pt_value,
    pt_value,
    pt_key_removed,
    pt_list_changed,
    pt_not_a_tensor,
    pt_tensor_shape,
    pt_tensor_dtype,
    pt_tensor_kind,
    pt_not_finite,
]
"""Damage to a run."""
