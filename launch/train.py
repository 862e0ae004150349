#!/usr/bin/env python3
"""Train a dense language model into an N:M sparse one.

deepspeed launch/train.py --deepspeed ds_configs/zero3.json                 # the embedded demo, on any machine
deepspeed launch/train.py --help

Exit code 0: the run is complete; 1: an error, in one line; 143: SIGTERM stopped it, it is saved, and --resume goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sparseforge_ds.train.arguments import argument_parser

if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):  # without waiting for DeepSpeed to be imported
        argument_parser().print_help()
        sys.exit(0)
    from sparseforge_ds.train.run import main

    sys.exit(main())
