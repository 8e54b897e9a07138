"""EngineRuns and the engines that hold them, as the rooms below `flows` see them.

An engine is opened by the scheme of its URL. Its module is above this package, so it is imported by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..core.value_types import JsonObject, replace
from ..terminal.parser import Mistakes, Option

if TYPE_CHECKING:
    from ..calls.call import Outcome
    from ..calls.control_channel import RunOrder
    from ..calls.principal import Principal
    from ..core.envelope import Envelope
    from ..core.errors import Failure
    from ..core.proposal import Confirmation, Decision, Proposal
    from ..store.runs import StepRecord, StoredRun
    from ..store.store import Store

_LOCAL = "shotclock.flows.engines"
_MODULES = {"temporal": "shotclock.temporal.opening"}
_HEADING = "Reaching Temporal"


class EngineAddress(Protocol):
    """The address of an engine, with its credentials. Its text is the URL."""

    @property
    def on_command_line(self) -> str: ...


class AddressError(ValueError):
    """Mistakes in the options of an address, each with its field."""

    def __init__(self, mistakes: Mistakes) -> None:
        super().__init__("; ".join(f"{mistake['field']}: {mistake['message']}" for mistake in mistakes))
        self.mistakes = mistakes


class RunState(Protocol):
    @property
    def is_running(self) -> bool: ...
    def as_job(self, where: str = "") -> dict[str, object]: ...


class EngineRuns(Protocol):
    """The runs of an engine, managed like jobs. Methods raise Failure for expected errors."""

    @property
    def where(self) -> str:
        """Return the options that name the engine on a command line; empty for this machine."""

    async def progress(self, run_id: str) -> RunState: ...

    async def wait(self, run_id: str, until_ns: int | None) -> Envelope | None:
        """Return the envelope of a run; None if it has not ended by then."""

    async def cancel(self, run_id: str) -> Envelope | None:
        """Stop a run, wait for its clean-up, and return its envelope; None if it has not ended in time."""

    async def order(self, order: RunOrder) -> JsonObject:
        """Extend a run or a step, or wind it down. Return its calls afterwards."""


class RemoteRuns(EngineRuns, Protocol):
    """The runs of an engine past this machine."""

    async def list_runs(self, most: int, *, active_only: bool = False) -> Sequence[RunState]: ...

    def unknown_outcome(self, failure: Failure, run_id: str) -> Outcome:
        """Return the outcome of a command that the engine may have accepted."""

    async def find_proposals(self, id: str | None = None) -> list[tuple[str, Proposal]]:
        """Return the proposals of runs, each with the id of its run."""


class EngineFront(Protocol):
    """The proposals and runs of an engine, as the operators' page of a server shows them."""

    url: str
    problem: str | None

    def looking(self) -> AbstractAsyncContextManager[None]:
        """Look at the engine repeatedly."""

    async def has(self, id: str) -> bool:
        """Return whether a proposal belongs to a run of the engine."""

    async def decide(
        self, proposal_id: str, decision: Decision, by: Principal, confirmation: Confirmation = ...
    ) -> Proposal: ...
    async def list_runs(self, most: int) -> tuple[list[tuple[StoredRun, dict[str, StepRecord], list[JsonObject]]], int]:
        """Return the runs with their steps and calls, and the number of runs that do not answer."""

    async def order(self, order: RunOrder) -> JsonObject: ...


class EngineModule(Protocol):
    """The functions of the module that opens an engine past this machine."""

    def check_url(self, text: str) -> EngineAddress:
        """Return the address of a URL, without credentials. Raises ValueError."""

    def read_address(self, text: str, environ: Mapping[str, str], options: Mapping[str, object]) -> EngineAddress:
        """Return the address with its credentials. Raises AddressError."""

    def open_runs(self, on: EngineAddress) -> RemoteRuns: ...
    def open_inbox(self, on: EngineAddress) -> Any: ...  # the part of an Inbox that shows and decides
    def open_front_end(self, on: EngineAddress, store: Callable[[], Store]) -> EngineFront: ...


def engine_at(on: EngineAddress | str) -> EngineModule:
    """Return the module of the engine at an address. A scheme that no engine has is left to Temporal's to refuse."""
    scheme = str(on).partition("://")[0]
    return cast(EngineModule, import_module(_MODULES.get(scheme, _MODULES["temporal"])))


def open_local_runs(store: Store) -> EngineRuns:
    runs: EngineRuns = import_module(_LOCAL).EmbeddedEngine(store)
    return runs


_CONNECTION = tuple(
    replace(each, heading=_HEADING, needs="--on")
    for each in (
        Option.flag("--tls", "Use TLS (implied by the options below).", default=None),
        Option.taking("--tls-ca-path", "FILE", "The certificates to trust, instead of those of this machine."),
        Option.taking("--tls-cert-path", "FILE", "The client certificate, for mTLS."),
        Option.taking("--tls-key-path", "FILE", "The key of the client certificate."),
        Option.taking(
            "--tls-server-name", "NAME", "The name in the server's certificate, if it is not the host of the URL."
        ),
        Option.taking(
            "--api-key-file",
            "FILE",
            "The file with the API key, instead of the variable TEMPORAL_API_KEY. The other options have the "
            "variables of Temporal's own tools: TEMPORAL_TLS, TEMPORAL_TLS_SERVER_CA_CERT_PATH and so on.",
        ),
    )
)


def engine_options(help: str, *, missing: str = "") -> tuple[Option, ...]:
    """Return --on and the options of the connection. A body gets them all as one EngineAddress, `on`."""
    on = Option.taking("--on", "URL", help, read=_read_url, missing=missing, heading=_HEADING, settle=_settle)
    return (on, *_CONNECTION)


def _read_url(text: str) -> str:
    engine_at(text).check_url(text)
    return text


def _settle(values: JsonObject) -> Mistakes:
    """Replace --on and the options of the connection by one EngineAddress, and return their mistakes."""
    connection = {each.key: values.pop(each.key) for each in _CONNECTION}
    url: str | None = values["on"]
    if url is None:
        return []
    engine = engine_at(url)
    try:
        values["on"] = engine.read_address(url, os.environ, connection)
    except AddressError as error:
        values["on"] = engine.check_url(url)  # not used: the line is refused
        return error.mistakes
    return []
