"""`python -m sparseforge_ds` is `sparseforge`."""

from sparseforge_ds.cli.main import command

command()
