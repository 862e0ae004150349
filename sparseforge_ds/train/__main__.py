"""`python -m sparseforge_ds.train`, for `deepspeed --module` and `torchrun -m`, is `sparseforge train`."""

import sys

from sparseforge_ds.cli.main import command

if __name__ == "__main__":
    command(["train", *sys.argv[1:]])
