"""Import of asyncio without TLS and other rarely used parts, which wins more than 5 ms of the start of an App.

It has to be imported before asyncio. The missing modules are imported at their first use.

docs/design.md: R24.
"""

from __future__ import annotations

import sys
from typing import Any

# Modules that asyncio imports at the top and rarely uses, for TLS and for source lines in tracebacks.
_RARELY_USED = ("ssl", "asyncio.sslproto", "tokenize", "textwrap", "locale")
_MODULES: dict[str, Any] = sys.modules


def _import_asyncio() -> None:
    stand_ins = {name: _DeferredModule(name) for name in _RARELY_USED if name not in sys.modules}
    if "ssl" in stand_ins:
        stand_ins["ssl"] = _DeferredTLS("ssl")
    _MODULES.update(stand_ins)
    try:
        import asyncio
    finally:
        for name, stand_in in stand_ins.items():
            if _MODULES.get(name) is stand_in:
                del _MODULES[name]
    if not hasattr(asyncio, "sslproto"):  # its import would have set it, and some libraries read it
        asyncio.sslproto = stand_ins["asyncio.sslproto"]  # type: ignore[attr-defined]


class _DeferredModule:
    """Stand-in for a module. The first use imports it."""

    __spec__ = None  # `import` looks at it where a module is there already

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> object:
        from importlib import import_module

        if _MODULES.get(self.__name__) is self:  # used while asyncio is still being imported
            del _MODULES[self.__name__]
        return getattr(import_module(self.__name__), name)


class _DeferredTLS(_DeferredModule):
    @property
    def SSLSocket(self) -> type:
        """Return the class of TLS sockets."""
        return getattr(sys.modules.get("ssl"), "SSLSocket", _NoSocket)


class _NoSocket:
    pass


if "asyncio" not in sys.modules:
    _import_asyncio()
