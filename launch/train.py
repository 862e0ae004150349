#!/usr/bin/env python3
"""Train a dense language model into an N:M sparse one; the same as `sparseforge train`.

deepspeed launch/train.py --deepspeed ds_configs/zero3.json                 # the embedded demo, on any machine
deepspeed launch/train.py --help

Exit code 0: the run is complete; 1: an error, in one line; 2: a flag that does not exist; 143: SIGTERM stopped it; 130:
Ctrl-C did. A run that was stopped while it trained is saved, and --resume goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sparseforge_ds.cli.main import command

if __name__ == "__main__":
    command(["train", *sys.argv[1:]])
