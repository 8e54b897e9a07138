"""Durable state: one SQLite file. Plain typed values go in and out; no SQL leaves this package."""

from .failures import StoreBusy, StoreError, StoreUnusable
from .home import private_file, state_home
from .store import Store

__all__ = ["Store", "StoreBusy", "StoreError", "StoreUnusable", "private_file", "state_home"]
