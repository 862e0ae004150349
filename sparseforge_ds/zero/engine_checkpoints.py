"""The engine's own `save_checkpoint` and `load_checkpoint`, so that a run is saved and continued as a whole by whoever
calls them: an own loop, accelerate's `save_state` and `load_state`, transformers' Trainer.

Saving is DeepSpeed's own, with one more entry of the client state. Loading is `zero.restore`, which fits any number of
ranks and any ZeRO stage, and unpickles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from sparseforge_ds.checkpoint.folder import newest_checkpoint, read_pointer
from sparseforge_ds.checkpoint.pt_file import why_unreadable
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.zero.restore import together
from sparseforge_ds.zero.shard import ShardLayout

KEY = "sparseforge"
"""Of the client state."""


def carry_state(
    layout: ShardLayout,
    state_dict: Callable[[], dict[str, Any]],
    restore: Callable[[Checkpoint], None],
    require_finite: Callable[[str], None],
) -> None:
    """From now on the engine's checkpoints carry a state, and loading one continues it.

    Args:
        layout: of the engine.
        state_dict: what is saved; called on all ranks.
        restore: continues from a checkpoint whose bytes are as they were saved; called on all ranks.
        require_finite: raises, on all ranks, where the weights are lost; takes what its message ends with.
    """
    engine = layout.engine
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(
        save_dir: str, tag: str | None = None, client_state: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        given = client_state or {}
        require_finite(_what_stays(layout, Path(save_dir)))
        carried = given if KEY in given else {**given, KEY: state_dict()}
        leave_out = kwargs.get("exclude_frozen_parameters", args[1] if len(args) > 1 else False)
        together(layout, lambda: _check_what_is_saved(layout, given, bool(leave_out)))
        return save(str(save_dir), tag, carried, *args, **kwargs)

    @functools.wraps(load)
    def load_checkpoint(
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str, dict[str, Any]]:
        whole = load_module_strict and load_optimizer_states and load_lr_scheduler_states
        if not whole or load_module_only or custom_load_fn is not None:
            raise ValueError(
                "engine.load_checkpoint: a run with masks is continued whole, with its optimizer states, its scheduler "
                "and every weight: leave out load_module_strict, load_optimizer_states, load_lr_scheduler_states, "
                "load_module_only and custom_load_fn; to start from the weights alone, export them with "
                "`sparseforge consolidate` and load that model"
            )
        checkpoint = together(layout, lambda: _read(_resolve_checkpoint(Path(load_dir), tag), layout))
        restore(checkpoint)
        # Without the state, which is older than the forge's once training goes on: a caller saves this dict again.
        return str(checkpoint.folder), {key: value for key, value in checkpoint.client_state.items() if key != KEY}

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def _check_what_is_saved(layout: ShardLayout, client_state: dict[str, Any], without_frozen: bool) -> None:
    """Raise ValueError for what could be saved and not be read again: loading unpickles nothing."""
    if without_frozen and any(name not in layout.shards for name, _ in layout.engine.module.named_parameters()):
        raise ValueError(
            "engine.save_checkpoint: exclude_frozen_parameters leaves out weights without which a run with masks can "
            "be neither continued nor exported; do not set it"
        )
    for group in layout.inner.param_groups:  # a learning rate that numpy computed is a number all the same
        numbers = {key: value for key, value in group.items() if not isinstance(value, Tensor)}
        group.update({key: value.item() for key, value in numbers.items() if hasattr(value, "item")})
    scheduler = getattr(layout.engine, "lr_scheduler", None)
    held = {} if scheduler is None else {"the scheduler's state_dict": scheduler.state_dict()}
    for key, value in {**{f"client_state[{key!r}]": value for key, value in client_state.items()}, **held}.items():
        if (odd := why_unreadable(value)) is not None:
            raise ValueError(
                f"engine.save_checkpoint: {key} could not be read again ({odd}), since loading unpickles nothing; save "
                "tensors, numbers and strings, and lists and dicts of these"
            )


def _what_stays(layout: ShardLayout, save_dir: Path) -> str:
    """Say that nothing was saved, and what is left in a folder to go back to. Collective: rank 0 looks."""
    newest = layout.all_gather_object(_newest(save_dir) if layout.rank == 0 else None)[0]
    if newest is None:
        return f"nothing was saved, and {save_dir} holds no earlier checkpoint: begin again with a lower learning rate"
    return f"nothing was saved; go back to {newest} by engine.load_checkpoint, with a lower learning rate"


def _newest(save_dir: Path) -> Path | None:
    """Return the checkpoint that DeepSpeed would load from a folder, if there is one."""
    try:
        return newest_checkpoint(save_dir)
    except ValueError:
        return None


def _resolve_checkpoint(load_dir: Path, tag: str | None) -> Path:
    """The checkpoint that DeepSpeed would load."""
    if tag is not None:
        return load_dir / tag
    return read_pointer(load_dir / "latest") if (load_dir / "latest").is_file() else load_dir


def _read(folder: Path, layout: ShardLayout) -> Checkpoint:
    """A checkpoint, of whose bytes every rank has compared its share with their checksums."""
    checkpoint = Checkpoint(folder)
    for file in checkpoint.files[layout.rank :: layout.world_size]:
        file.check_bytes()
    return checkpoint
