"""Shotclock: nothing an agent starts can hang.

The public names are imported when first used, because a wrapper that stands before every command must be
cheap to start.
"""

from __future__ import annotations

from .core.late import names_of

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .app import App as App
    from .core.catalogue import Interruption as Interruption
    from .core.clocks import Clocks as Clocks
    from .core.durations import DurationError as DurationError
    from .core.durations import format_duration as format_duration
    from .core.durations import parse_duration_ms as parse_duration_ms
    from .core.effects import Ending as Ending
    from .core.effects import SideEffects as SideEffects
    from .core.envelope import Envelope as Envelope
    from .core.errors import Failure as Failure
    from .core.errors import register_error as register_error
    from .core.operation import Operation as Operation
    from .enforce.call import Runtime as Runtime
    from .enforce.context import Context as Context
    from .enforce.context import Stopped as Stopped

_HOME = {
    "App": "app",
    "Clocks": "core.clocks",
    "Context": "enforce.context",
    "DurationError": "core.durations",
    "Ending": "core.effects",
    "Envelope": "core.envelope",
    "Failure": "core.errors",
    "Interruption": "core.catalogue",
    "Operation": "core.operation",
    "Runtime": "enforce.call",
    "SideEffects": "core.effects",
    "Stopped": "enforce.context",
    "format_duration": "core.durations",
    "parse_duration_ms": "core.durations",
    "register_error": "core.errors",
}
__all__ = sorted(_HOME)


__getattr__ = names_of(__name__, _HOME)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
