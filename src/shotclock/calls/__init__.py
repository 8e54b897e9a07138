"""The runtime: a call is admitted here, runs in a process or on a loop that can be stopped, and is answered once.

The way of one call through the modules is drawn in docs/design.md.
"""
