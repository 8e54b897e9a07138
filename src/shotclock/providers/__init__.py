"""Providers: what the steps of a workflow do. Each kind in a file of its own, none knows another."""
