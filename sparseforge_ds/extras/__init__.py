"""Parts that can be deleted, and the rest still works: the command line alone imports them, at their first use."""
