"""The pure core: no I/O, no source of time, nothing that can block.

Contract (AGENTS.md): the core is pure.
"""
