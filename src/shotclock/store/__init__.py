"""Durable state: one SQLite file. Plain typed values go in and out; no SQL leaves this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.late import names_of

if TYPE_CHECKING:
    from .failures import StoreBusy as StoreBusy
    from .failures import StoreError as StoreError
    from .failures import StoreUnusable as StoreUnusable
    from .home import private_file as private_file
    from .home import state_home as state_home
    from .store import Store as Store

_MODULES = {
    "Store": "store",
    "StoreBusy": "failures",
    "StoreError": "failures",
    "StoreUnusable": "failures",
    "private_file": "home",
    "state_home": "home",
}
__all__ = sorted(_MODULES)
__getattr__ = names_of(__name__, _MODULES)
