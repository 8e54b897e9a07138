"""Jobs: work that goes on after its caller has left, and how many may run at once. The store is between them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.late import names_of

if TYPE_CHECKING:
    from .front import Front as Front
    from .invocation import Invocation as Invocation
    from .invocation import Stdin as Stdin
    from .invocation import invocation_key as invocation_key
    from .turnstile import Turnstile as Turnstile

_MODULES = {
    "Front": "front",
    "Invocation": "invocation",
    "Stdin": "invocation",
    "Turnstile": "turnstile",
    "invocation_key": "invocation",
}
__all__ = sorted(_MODULES)
__getattr__ = names_of(__name__, _MODULES)
