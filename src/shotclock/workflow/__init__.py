"""Workflows: the file, what is wrong with it, and what it would take to run it."""
