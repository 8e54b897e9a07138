"""The command of our own process that talks to a server over HTTP."""

from __future__ import annotations

import os
import sys

from .endpoint import Endpoint
from .failures import OF_SESSION
from .server_process import ServerCommand


class AdapterCommand(ServerCommand):
    """The adapter of an endpoint, started and supervised as any server."""

    def __init__(self, endpoint: Endpoint, grace_ms: int) -> None:
        # -P, and only our own root on the path: a `queue.py` in the current folder must not be imported.
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        code = f"import sys; sys.path.append({root!r}); from shotclock.wrap.http_client import main; main()"
        # The address may have a secret query, and others see the words of a command.
        argv = [sys.executable, "-P", "-c", code, endpoint.origin]
        super().__init__(argv, endpoint.to_environment(), None, grace_ms)
        self.words = OF_SESSION
        self._endpoint = endpoint

    @property
    def name(self) -> str:
        return self._endpoint.host

    @property
    def identity(self) -> list[str]:
        return [self._endpoint.identity]
