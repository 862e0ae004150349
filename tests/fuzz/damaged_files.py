"""Damage that needs no knowledge of formats: lost, cut, flipped, swapped and foreign files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.fuzz.scene import ANY_FILE, Mutation, NotApplicable, Scene


def _write(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def truncate(scene: Scene) -> None:
    path = scene.pick(*ANY_FILE)
    content = path.read_bytes()
    _write(path, content[: scene.rng.randrange(len(content))])


def truncate_newest(scene: Scene) -> None:
    path = scene.pick_pt()
    content = path.read_bytes()
    keep = scene.rng.choice([4, 30, 4096, len(content) // 2, len(content) - 22, len(content) - 1])
    _write(path, content[: min(keep, len(content) - 1)])


def append(scene: Scene) -> None:
    path = scene.pick(*ANY_FILE)
    _write(path, path.read_bytes() + scene.rng.randbytes(scene.rng.choice([1, 22, 5000])))


def flip_bit(scene: Scene) -> None:
    _flip(scene, scene.pick(*ANY_FILE), 0.0, 1.0, 1)


def flip_bit_of_newest(scene: Scene) -> None:
    _flip(scene, scene.pick_pt(), 0.0, 1.0, 1)


def flip_burst(scene: Scene) -> None:
    _flip(scene, scene.pick("*.pt", "*.safetensors"), 0.0, 1.0, scene.rng.choice([2, 8, 64]))


def flip_head(scene: Scene) -> None:
    path = scene.pick("*.pt", "*.safetensors")
    _flip(scene, path, 0.0, 256 / max(257, path.stat().st_size), scene.rng.choice([1, 3]))


def flip_directory(scene: Scene) -> None:
    """Flip a bit in the central directory of a zip file, which lies at its end."""
    path = scene.pick_pt()
    _flip(scene, path, 1 - 2000 / path.stat().st_size, 1.0, scene.rng.choice([1, 1, 3]))


def flip_pickle(scene: Scene) -> None:
    path = scene.pick_pt()
    content = path.read_bytes()
    start = content.index(b"data.pkl") / len(content)
    _flip(scene, path, start, min(1.0, start + 4000 / len(content)), scene.rng.choice([1, 2, 5]))


def _flip(scene: Scene, path: Path, low: float, high: float, count: int) -> None:
    content = bytearray(path.read_bytes())
    if not content:
        raise NotApplicable
    for _ in range(count):
        at = min(len(content) - 1, int(len(content) * scene.rng.uniform(max(0.0, low), high)))
        content[at] ^= 1 << scene.rng.randrange(8)
    _write(path, bytes(content))


def zero_sector(scene: Scene) -> None:
    """Zero a sector, as a file system does where a block was never written."""
    path = scene.pick("*.pt", "*.safetensors")
    content = bytearray(path.read_bytes())
    at = scene.rng.randrange(0, len(content), 512)
    length = min(scene.rng.choice([512, 4096]), len(content) - at)
    content[at : at + length] = bytes(length)
    _write(path, bytes(content))


def random_content(scene: Scene) -> None:
    path = scene.pick(*ANY_FILE)
    _write(path, scene.rng.randbytes(scene.rng.choice([1, 100, path.stat().st_size])))


def remove(scene: Scene) -> None:
    scene.pick(*ANY_FILE).unlink()


def remove_from_newest(scene: Scene) -> None:
    scene.pick_pt().unlink()


def empty(scene: Scene) -> None:
    _write(scene.pick(*ANY_FILE), b"")


def folder_instead(scene: Scene) -> None:
    path = scene.pick(*ANY_FILE)
    path.unlink()
    path.mkdir()


def link_to_itself(scene: Scene) -> None:
    path = scene.pick(*ANY_FILE)
    path.unlink()
    path.symlink_to(path.name)


def link_to_nowhere(scene: Scene) -> None:
    path = scene.pick(*ANY_FILE)
    path.unlink()
    path.symlink_to("/nonexistent/file")


def pipe_instead(scene: Scene) -> None:
    """Whoever opens it without looking waits for ever."""
    path = scene.pick(*ANY_FILE)
    path.unlink()
    os.mkfifo(path)


def device_instead(scene: Scene) -> None:
    """Whoever reads it to its end fills the memory."""
    path = scene.pick(*ANY_FILE)
    path.unlink()
    path.symlink_to("/dev/zero")


def rename(scene: Scene) -> None:
    path = scene.pick(*ANY_FILE)
    path.rename(scene.touch(path.with_name(scene.rng.choice(["x" + path.name, path.name + ".bak", "other.pt"]))))


def rename_rank(scene: Scene) -> None:
    path = scene.pick_pt("*rank_1*")
    path.rename(scene.touch(path.with_name(path.name.replace("rank_1", f"rank_{scene.rng.choice([2, 7, 10**6])}"))))


def swap_ranks(scene: Scene) -> None:
    """Two ranks' files under each other's names."""
    first, second = _both_ranks(scene)
    middle = first.with_name("swap")
    first.rename(middle)
    second.rename(first)
    middle.rename(second)


def copy_rank(scene: Scene) -> None:
    first, second = _both_ranks(scene)
    shutil.copyfile(first, second)


def _both_ranks(scene: Scene) -> tuple[Path, Path]:
    kind = scene.rng.choice(["optim", "model"])
    files = sorted(scene.checkpoint().glob(f"*_{kind}_states.pt"))
    if len(files) != 2:
        raise NotApplicable
    return scene.touch(files[0]), scene.touch(files[1])


def two_files_of_a_rank(scene: Scene) -> None:
    path = scene.pick_pt("*optim_states.pt")
    shutil.copyfile(path, scene.touch(path.with_name(_other_name(path.name))))


def _other_name(name: str) -> str:
    return name.removeprefix("bf16_") if name.startswith("bf16_") else f"bf16_{name}"


def foreign_file(scene: Scene) -> None:
    path = scene.pick_pt()
    name = scene.rng.choice(["layer_00-model_states.pt", "expert_0_mp_rank_00_model_states.pt", "notes.pt"])
    shutil.copyfile(path, scene.touch(path.with_name(name)))


def file_of_another_step(scene: Scene) -> None:
    path = scene.pick_pt()
    _replace(path, scene.folder / "checkpoints" / "step_000003" / path.name)


def half_of_another_step(scene: Scene) -> None:
    """Take all files of one kind from another step: an interrupted copy, or one of two archives restored."""
    kind = scene.rng.choice(["*_optim_states.pt", "*_model_states.pt"])
    for path in sorted(scene.checkpoint().glob(kind)):
        _replace(scene.touch(path), scene.folder / "checkpoints" / "step_000003" / path.name)


def file_of_another_run(scene: Scene) -> None:
    """Take a file of another run: of the same stage and sizes where there is such a run, or of any other."""
    path = scene.pick_pt()
    stage = scene.subject[:6]
    same = [name for name in ("stage2_other_seed", "stage3_other_seed") if name.startswith(stage)]
    _replace(path, scene.inputs / scene.rng.choice(same or ["stage2_fp32"]) / path.relative_to(scene.folder))


def file_of_another_layout(scene: Scene) -> None:
    """Take a file of another stage, dtype or world size."""
    path = scene.pick_pt()
    donors = sorted(run.name for run in scene.inputs.iterdir() if (run / path.relative_to(scene.folder)).is_file())
    donors = [name for name in donors if name != scene.subject]
    if not donors:
        raise NotApplicable
    _replace(path, scene.inputs / scene.rng.choice(donors) / path.relative_to(scene.folder))


def _replace(path: Path, by: Path) -> None:
    if not by.is_file() or by.read_bytes() == path.read_bytes():
        raise NotApplicable
    shutil.copyfile(by, path)


def latest_is_nonsense(scene: Scene) -> None:
    """It is written for DeepSpeed's own tools and read by none of ours."""
    path = scene.folder / "checkpoints" / "latest"
    if not path.is_file():
        raise NotApplicable
    text = ["../..", "/etc", "step_000009", "", "\0", "step_000003.tmp", "x" * 5000, ".", "step_000006/../step_000003"]
    scene.touch(path).write_text(scene.rng.choice(text))


def newest_is_gone(scene: Scene) -> None:
    """Remove the newest checkpoint, as whoever goes back to the one before does."""
    shutil.rmtree(scene.touch(scene.checkpoint()))


MUTATIONS: list[Mutation] = [
    truncate,
    append,
    flip_bit,
    flip_burst,
    flip_head,
    zero_sector,
    random_content,
    remove,
    empty,
    folder_instead,
    link_to_itself,
    link_to_nowhere,
    pipe_instead,
    device_instead,
    rename,
]
"""Damage to any folder."""
RUN_MUTATIONS: list[Mutation] = [
    truncate_newest,
    flip_bit_of_newest,
    flip_directory,
    flip_pickle,
    remove_from_newest,
    foreign_file,
    file_of_another_step,
    half_of_another_step,
    file_of_another_run,
    file_of_another_layout,
    latest_is_nonsense,
    newest_is_gone,
]
"""Damage to a run."""
SHARDED_MUTATIONS: list[Mutation] = [
    rename_rank,
    swap_ranks,
    copy_rank,
    two_files_of_a_rank,
]
"""Damage to a run with a file per rank."""
