"""The version of this package, where every module may read it."""

__version__ = "0.1.0"
