"""Runs past one machine, on Temporal: the workflow, the activity for a step, worker, client, dev server."""
