"""`python -m sparseforge_ds.train`, for `deepspeed --module` and `torchrun -m`, is `sparseforge train`."""

import sys

from sparseforge_ds.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
