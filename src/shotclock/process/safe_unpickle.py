"""Unpickling of users' values that came from another process, where it may be done.

Opening a pickle imports the modules of the classes in it. A process that is to run no code of its users' (a server)
opens only what is made of plain values and classes of our own; everything else it knows by its JSON form, which travels
beside.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from typing import Any

# The opcode that looks up a class, in every protocol since 4. As a byte of some text it also stands where none is.
_CLASS = b"\x93"
_BUILTINS = frozenset({"bytearray", "complex", "frozenset", "range", "set"})
_PLAIN_MODULES = frozenset({"collections", "datetime", "decimal", "fractions", "uuid"})

_opens_all = True


def is_plain(pickled: bytes) -> bool:
    """Return whether it can be opened anywhere. True is certain, False is not."""
    return _CLASS not in pickled


def unpickle(pickled: bytes) -> Any:
    """Unpickle a value. Raises what pickle raises; where users' code is kept out, also for values that would import
    it."""
    if _opens_all or is_plain(pickled):
        return pickle.loads(pickled)
    return _PlainUnpickler(io.BytesIO(pickled)).load()


@contextlib.contextmanager
def keep_users_code_out() -> Iterator[None]:
    """Refuse values of users' classes meanwhile, for the process as a whole."""
    global _opens_all
    before, _opens_all = _opens_all, False
    try:
        yield
    finally:
        _opens_all = before


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name in _BUILTINS:
            return super().find_class(module, name)
        if module in _PLAIN_MODULES or module.startswith("shotclock.core."):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} belongs to a program that is not imported here")
