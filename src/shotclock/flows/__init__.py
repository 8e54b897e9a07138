"""Workflows: a file is read, checked, planned, scheduled, run and reported."""
