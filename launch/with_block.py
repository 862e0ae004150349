"""A DeepSpeed JSON with other keys in its `sparseforge` block, for recipes that vary one thing.

The JSON is read as the launcher reads it: a path, or the name of one in the package, like `zero3`.

python launch/with_block.py ds_configs/zero3.json runs/magnitude.json '{"importance": "magnitude"}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.json_file import parse_json, parse_json_file
from sparseforge_ds.config.shipped import configuration_file


def main(base: str, out: str, keys: str) -> None:
    """Write `out`: the JSON `base` with the object `keys` over its block.

    Raises:
        ValueError: `base` or `keys` cannot be read, or the block is wrong.
    """
    content = parse_json_file(configuration_file(base), base)
    block = content.get("sparseforge", {}) if isinstance(content, dict) else None
    if not isinstance(block, dict):
        raise ValueError(f'{base}: not a JSON object with an object "sparseforge"; give a DeepSpeed JSON')
    changes = parse_json(keys, "KEYS")
    if not isinstance(changes, dict):
        raise ValueError('KEYS: not a JSON object; give keys of the block, like {"importance": "magnitude"}')
    content["sparseforge"] = {**block, **changes}
    # Refuse a wrong block before anything is written.
    SparseForgeConfig.from_dict(content["sparseforge"])
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: launch/with_block.py BASE OUT KEYS")
    try:
        main(*sys.argv[1:])
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
