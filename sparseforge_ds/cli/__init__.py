"""The `sparseforge` command: one file per subcommand. `main` in main.py is its entry point."""
