"""The forge's part of a checkpoint's client state: whether it is of a run like this one."""

from __future__ import annotations

from typing import Any

from sparseforge_ds.config import SparseForgeConfig

STATE_VERSION = 1


def check_saved_state(state: dict[str, Any], config: SparseForgeConfig, weights: list[dict[str, Any]]) -> None:
    """Hold a saved state against the present run.

    Args:
        state: from the checkpoint.
        config: of this run; what is only monitored may differ.
        weights: this run's prunable weights, as in `SparseForge.state_dict`.

    Raises:
        ValueError: it is damaged, of another version, or of another configuration or model; with the first difference.
    """
    if state.get("version") != STATE_VERSION:
        raise ValueError(
            f"the checkpoint has sparseforge state version {state.get('version')}, this is {STATE_VERSION}: "
            "resume with the release that wrote it"
        )
    for key, kind in (("config", dict), ("weights", list), ("step", int), ("refreshes", int)):
        if not isinstance(state.get(key), kind):
            raise ValueError(f"the checkpoint's sparseforge state has a damaged {key!r}: {state.get(key)!r:.100}")
    # A release before this one did not write keys that it did not have.
    saved = SparseForgeConfig.from_dict(state["config"])
    _same("sparseforge", _without_monitor(saved.to_dict()), _without_monitor(config.to_dict()))
    _same("weights", state["weights"], weights)


def _without_monitor(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "monitor"}


def _same(where: str, saved: Any, present: Any) -> None:
    """Raise with the first place where two JSON values differ."""
    if isinstance(saved, dict) and isinstance(present, dict):
        for key in sorted(saved.keys() | present.keys()):
            _same(f"{where}.{key}", saved.get(key), present.get(key))
    elif saved != present:
        short = [text if len(text) < 200 else text[:200] + " ..." for text in (str(saved), str(present))]
        raise ValueError(
            f"the checkpoint was made with {where} = {short[0]}, this run has {short[1]}: "
            "resume with the saved settings, or start a fresh run in another output_dir"
        )
