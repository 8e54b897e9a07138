"""Processes: how they are started, watched, stopped and seen gone, and the programs of our own child processes."""
