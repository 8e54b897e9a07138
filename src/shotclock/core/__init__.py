"""The pure core: no I/O, no source of time, nothing that can block.

docs/design.md: R4.
"""
