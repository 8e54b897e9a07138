"""The version of this package: the only place that has it."""

__version__ = "0.2.0"
