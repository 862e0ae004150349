"""Saving and loading of a run through the engine's own `save_checkpoint` and `load_checkpoint`.

An own loop, accelerate's `save_state` and `load_state`, and transformers' Trainer call these methods, and all save and
continue the run in full. Saving is DeepSpeed's own, with one more entry in the client state. Loading is `zero.restore`,
which fits any number of ranks and any ZeRO stage, and unpickles nothing.
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
from sparseforge_ds.ranks import all_or_raise
from sparseforge_ds.zero.shard import ShardLayout

KEY = "sparseforge"
"""Key of our entry in the client state."""


def carry_state(
    layout: ShardLayout,
    state_dict: Callable[[], dict[str, Any]],
    restore: Callable[[Checkpoint], None],
    require_finite: Callable[[str], None],
) -> None:
    """Replace the engine's `save_checkpoint` and `load_checkpoint`, so that checkpoints carry a state.

    Args:
        layout: shard map of the engine.
        state_dict: function that returns the state to save; called on all ranks.
        restore: function that continues from a checkpoint with intact bytes; called on all ranks.
        require_finite: function that raises, on all ranks, if weights are not finite; it gets the end of the message.
    """
    engine = layout.engine
    save = engine.save_checkpoint
    load = engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(
        save_dir: str, tag: str | None = None, client_state: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        own_state = client_state or {}
        # Nothing is written that nobody could use, or read.
        require_finite(_describe_fallback(layout, Path(save_dir)))
        full_state = own_state if KEY in own_state else {**own_state, KEY: state_dict()}
        exclude_frozen = kwargs.get("exclude_frozen_parameters", args[1] if len(args) > 1 else False)
        all_or_raise(lambda: _check_readable(layout, own_state, bool(exclude_frozen)), layout.all_gather_object)
        return save(str(save_dir), tag, full_state, *args, **kwargs)

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
        # A part of a run cannot be continued.
        everything = load_module_strict and load_optimizer_states and load_lr_scheduler_states
        if not everything or load_module_only or custom_load_fn is not None:
            raise ValueError(
                "engine.load_checkpoint: a run with masks is continued in full, with its optimizer states, its "
                "scheduler and every weight: leave out load_module_strict, load_optimizer_states, "
                "load_lr_scheduler_states, load_module_only and custom_load_fn; to start from the weights alone, "
                "export them with `sparseforge consolidate` and load that model"
            )
        checkpoint = all_or_raise(
            lambda: _read(_resolve_checkpoint(Path(load_dir), tag), layout), layout.all_gather_object
        )
        restore(checkpoint)
        # A caller saves this dict again, when our entry would be older than the forge's state.
        return str(checkpoint.folder), {key: value for key, value in checkpoint.client_state.items() if key != KEY}

    engine.save_checkpoint = save_checkpoint
    engine.load_checkpoint = load_checkpoint


def _check_readable(layout: ShardLayout, client_state: dict[str, Any], exclude_frozen: bool) -> None:
    """Raise ValueError for a save that could not be read again, since loading unpickles nothing."""
    if exclude_frozen and any(name not in layout.shards for name, _ in layout.engine.module.named_parameters()):
        raise ValueError(
            "engine.save_checkpoint: exclude_frozen_parameters leaves out weights without which a run with masks can "
            "be neither continued nor exported; do not set it"
        )
    # A learning rate that numpy computed becomes a plain number.
    for group in layout.inner.param_groups:
        numbers = {key: value for key, value in group.items() if not isinstance(value, Tensor)}
        group.update({key: value.item() for key, value in numbers.items() if hasattr(value, "item")})
    scheduler = getattr(layout.engine, "lr_scheduler", None)
    saved = {f"client_state[{key!r}]": value for key, value in client_state.items()}
    if scheduler is not None:
        saved["the scheduler's state_dict"] = scheduler.state_dict()
    for name, value in saved.items():
        if (reason := why_unreadable(value)) is not None:
            raise ValueError(
                f"engine.save_checkpoint: {name} could not be read again ({reason}), since loading unpickles nothing; "
                "save tensors, numbers and strings, and lists and dicts of these"
            )


def _describe_fallback(layout: ShardLayout, save_dir: Path) -> str:
    """Return the end of a message: nothing was saved, and the checkpoint to go back to. Collective: rank 0 looks."""
    looked_up = all_or_raise(lambda: _newest(save_dir) if layout.rank == 0 else None, layout.all_gather_object)
    newest = layout.all_gather_object(looked_up)[0]
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
    """Return the checkpoint folder that DeepSpeed would load."""
    if tag is not None:
        return load_dir / str(tag)  # DeepSpeed takes numbers too
    return read_pointer(load_dir / "latest") if (load_dir / "latest").is_file() else load_dir


def _read(folder: Path, layout: ShardLayout) -> Checkpoint:
    """Open a checkpoint, after this rank has compared the bytes of its share of the files with their checksums."""
    checkpoint = Checkpoint(folder)
    for file in checkpoint.files[layout.rank :: layout.world_size]:
        file.check_bytes()
    return checkpoint
