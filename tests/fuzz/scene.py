"""One case of the fuzzer: a copy of a good folder, randomness, and what the damage may take from elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


class NotApplicable(Exception):
    """The damage has nothing to damage in this folder."""


@dataclass
class Scene:
    """Folder and random numbers that a mutation may use."""

    folder: Path
    """The copy that is damaged."""
    rng: random.Random
    inputs: Path
    """Folder of the good folders, those of other runs too."""
    subject: str
    """Name of the one that was copied."""
    canary: Path
    """The file that hostile code would create."""
    touched: set[str] = field(default_factory=set)
    """Names of the files that were damaged, removed or added."""
    unlisted: bool = False
    """The manifest was removed and checksums are right: what was changed consistently, nobody can know."""

    def pick(self, *patterns: str) -> Path:
        """Return a random file below the folder, and note that it is going to be damaged."""
        paths = sorted({path for pattern in patterns for path in self.folder.rglob(pattern) if path.is_file()})
        paths = [path for path in paths if path.name not in _UNREAD and path.parent.name != "data"]
        newest = [path for path in paths if path.parent.name != "step_000003"]
        if not paths:
            raise NotApplicable
        return self.touch(self.rng.choice(newest if newest and self.rng.random() < 0.9 else paths))

    def touch(self, path: Path) -> Path:
        """Note that a file is damaged."""
        self.touched.add(path.name)
        return path

    def checkpoint(self) -> Path:
        """Return the folder of the checkpoint that tools look at: the newest one."""
        paths = sorted(self.folder.glob("checkpoints/step_*"))
        if not paths:
            raise NotApplicable
        return paths[-1]

    def pick_pt(self, pattern: str = "*_states.pt") -> Path:
        """Return a random `.pt` file of the newest checkpoint."""
        paths = sorted(self.checkpoint().glob(pattern))
        if not paths:
            raise NotApplicable
        return self.touch(self.rng.choice(paths))


Mutation = Callable[[Scene], None]
_UNREAD = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "ds_config.json"}
"""Files that no tool reads; they are copied as they are."""
ANY_FILE = ("*.pt", "*.json", "latest", "*.safetensors")
