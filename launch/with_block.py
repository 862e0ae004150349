"""A DeepSpeed JSON with other keys in its `sparseforge` block, for recipes that vary one thing.

python launch/with_block.py ds_configs/zero3.json runs/magnitude.json '{"importance": "magnitude"}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sparseforge_ds.config import SparseForgeConfig


def main(base: str, out: str, keys: str) -> None:
    """Write `out`: the JSON `base` with the object `keys` over its block."""
    content = json.loads(Path(base).read_text())
    content["sparseforge"] = {**content.get("sparseforge", {}), **json.loads(keys)}
    SparseForgeConfig.from_dict(content["sparseforge"])  # for its errors
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: launch/with_block.py BASE OUT KEYS")
    try:
        main(*sys.argv[1:])
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
