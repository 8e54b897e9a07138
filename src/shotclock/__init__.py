"""Shotclock: nothing an agent starts can hang.

AGENTS.md beside this file has the rooms, docs/design.md the map and the way of a call. The public names are imported on
first use, so that `exec` starts fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._version import __version__ as __version__
from .core.lazy_names import names_on_first_use

if TYPE_CHECKING:
    from .apps.app import App as App
    from .apps.secret_parameters import Secret as Secret
    from .calls.runtime import Runtime as Runtime
    from .commands.run import arun as arun
    from .commands.run import run as run
    from .core.catalogue import Interruption as Interruption
    from .core.catalogue import Operation as Operation
    from .core.envelope import Envelope as Envelope
    from .core.errors import Ending as Ending
    from .core.errors import Failure as Failure
    from .core.errors import SideEffects as SideEffects
    from .core.errors import register_error as register_error
    from .core.limits import Clocks as Clocks
    from .core.limits import DurationError as DurationError
    from .core.limits import format_duration as format_duration
    from .core.limits import parse_duration_ms as parse_duration_ms
    from .worker.client_forms import Answer as Answer
    from .worker.client_forms import Root as Root
    from .worker.client_forms import Sampled as Sampled
    from .worker.content import Audio as Audio
    from .worker.content import EmbeddedResource as EmbeddedResource
    from .worker.content import File as File
    from .worker.content import Image as Image
    from .worker.content import Message as Message
    from .worker.content import ResourceLink as ResourceLink
    from .worker.context import Context as Context
    from .worker.context import Stopped as Stopped
    from .worker.dependencies import Depends as Depends

_HOME = {
    "Answer": "worker.client_forms",
    "App": "apps.app",
    "Audio": "worker.content",
    "Clocks": "core.limits",
    "Context": "worker.context",
    "Depends": "worker.dependencies",
    "DurationError": "core.limits",
    "EmbeddedResource": "worker.content",
    "Ending": "core.errors",
    "Envelope": "core.envelope",
    "Failure": "core.errors",
    "File": "worker.content",
    "Image": "worker.content",
    "Interruption": "core.catalogue",
    "Message": "worker.content",
    "Operation": "core.catalogue",
    "ResourceLink": "worker.content",
    "Root": "worker.client_forms",
    "Runtime": "calls.runtime",
    "Sampled": "worker.client_forms",
    "Secret": "apps.secret_parameters",
    "SideEffects": "core.errors",
    "Stopped": "worker.context",
    "arun": "commands.run",
    "format_duration": "core.limits",
    "parse_duration_ms": "core.limits",
    "register_error": "core.errors",
    "run": "commands.run",
}
__all__ = sorted(_HOME)
if not TYPE_CHECKING:  # a type checker that sees `__getattr__` accepts every name
    __getattr__, __dir__ = names_on_first_use(__name__, _HOME)
