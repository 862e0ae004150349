"""Upload of an exported folder to the hub, as a model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import huggingface_hub
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import HTTPError

from sparseforge_ds.checkpoint.disk import json_bytes
from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.checkpoint.model_files import check_links
from sparseforge_ds.export.adapter import ADAPTER_CONFIG
from sparseforge_ds.export.stored import read_sparsity
from sparseforge_ds.model.hub_access import REPOSITORY
from sparseforge_ds.model.loading_error import reason

_LOADED = (
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"),
    "adapter_model.safetensors",
)
"""Files that transformers loads from the root of a repository; others there are left alone."""


def require_hub_name(name: str) -> None:
    """Reject a value of `--push` that is no name on the hub."""
    if not REPOSITORY.fullmatch(name):
        raise ValueError(f"--push {name}: give owner/name")


def push(folder: Path, name: str, private: bool = False) -> str:
    """Upload a folder to the hub as a model, which is created if it does not exist, and return its address.

    Raises:
        ValueError: the hub refuses, or a link leads out of the folder.
    """
    require_hub_name(name)
    check_links(folder, everything=True)
    changed = _with_base(folder, name) if (folder / ADAPTER_CONFIG).is_file() else {}
    message = "Upload by sparseforge card"
    try:
        api = huggingface_hub.HfApi()
        address = api.create_repo(name, private=private, exist_ok=True)
        # The adapter comes before the weights, which compute nonsense without it.
        if changed:
            additions = [CommitOperationAdd(file, content) for file, content in changed.items()]
            api.create_commit(name, additions, commit_message=message)
        # What an earlier upload had in other files would be loaded beside, or in place of, the new weights.
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=message,
            ignore_patterns=list(changed),
            delete_patterns=[*_LOADED, *({ADAPTER_CONFIG} - changed.keys())],
        )
    except (HTTPError, ValueError, OSError) as error:
        raise ValueError(
            f"--push {name}: the hub did not take it ({reason(error)}); check name, network and token (hf auth login)"
        ) from None
    return str(address)


def _with_base(folder: Path, name: str) -> dict[str, bytes]:
    """Return the files whose content on the hub differs: there, the adapter names the uploaded model as its base.

    The folder itself stays as it is, with the adapter of the weights beside it.
    """
    adapter = {**read_json_object(folder / ADAPTER_CONFIG), "base_model_name_or_path": name}
    files = {ADAPTER_CONFIG: json_bytes(adapter)}
    record = read_sparsity(folder)
    if "adapter_config_sha256" in record:
        digest = hashlib.sha256(files[ADAPTER_CONFIG]).hexdigest()
        files["sparsity.json"] = json_bytes({**record, "adapter_config_sha256": digest})
    return files
