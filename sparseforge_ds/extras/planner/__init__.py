"""Plan of a run, and dry run: memory, time and disk without weights or GPUs."""
