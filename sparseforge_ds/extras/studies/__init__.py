"""Comparison of methods over seeds and budgets: runs, figures, tables and one page."""
