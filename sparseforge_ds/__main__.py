"""`python -m sparseforge_ds` is `sparseforge`."""

import sys

from sparseforge_ds.cli.main import main

sys.exit(main())
