"""Open subscriptions of 2026-07-28: one request of the client that stays open at every server.

Each server marks the messages of a subscription with the id of the request, which is the client's own everywhere.
So they pass unchanged; only the acknowledgements and the ends of all servers become one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.clocks import NS_PER_MS
from ...core.value_types import field, record
from ...process.clock import monotonic_ns
from ..links import ClientLink
from ..messages import JsonObject, Key, RpcMessage, key_of, notification_line
from ..requests import NEVER_NS
from .server import MergedServer

SUBSCRIPTION_KEY = "io.modelcontextprotocol/subscriptionId"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
# How long a client waits for the acknowledgement of a slow server.
ACKNOWLEDGE_WAIT_MS = 20_000
_FILTERS = {"tools": "toolsListChanged", "prompts": "promptsListChanged", "resources": "resourcesListChanged"}


@record
class Subscription:
    """One open request of the client."""

    id: object
    line: bytes
    silent: set[MergedServer]  # those that have not acknowledged it
    open: set[MergedServer]
    due_ns: int
    honored: JsonObject = field(default_factory=dict)
    is_acknowledged: bool = False


class MergedSubscriptions:
    """The open subscriptions of the client."""

    def __init__(self, client: ClientLink) -> None:
        self._client = client
        self._open: dict[Key, Subscription] = {}

    def begin(self, message: RpcMessage, servers: Sequence[MergedServer]) -> None:
        key = key_of(message.id)
        if key is None:
            return
        due_ns = monotonic_ns() + ACKNOWLEDGE_WAIT_MS * NS_PER_MS
        self._open[key] = Subscription(message.id, message.line, set(servers), set(servers), due_ns)
        for server in servers:
            server.send(message.line)

    def is_open(self, key: Key | None) -> bool:
        return key in self._open

    def repeat(self, server: MergedServer) -> None:
        """Subscribe at a server that was started again."""
        for subscription in self._open.values():
            subscription.open.add(server)
            server.send(subscription.line)

    def lose(self, server: MergedServer) -> None:
        """Do not wait for a server that has ended. It is asked again when it is back."""
        for subscription in self._open.values():
            subscription.silent.discard(server)
            self._acknowledge_if_complete(subscription)

    def cancel(self, key: Key | None, line: bytes) -> None:
        subscription = None if key is None else self._open.pop(key, None)
        for server in () if subscription is None else subscription.open:
            server.send(line)

    def take_acknowledgement(self, server: MergedServer, message: RpcMessage) -> None:
        key = key_of(message.meta.get(SUBSCRIPTION_KEY))
        subscription = None if key is None else self._open.get(key)
        if subscription is None or subscription.is_acknowledged:
            return
        honored = message.params.get("notifications")
        for name, item in honored.items() if isinstance(honored, dict) else ():
            have = subscription.honored.get(name)
            if isinstance(have, list) and isinstance(item, list):
                subscription.honored[name] = [*have, *(each for each in item if each not in have)]
            elif not have:
                subscription.honored[name] = item
        subscription.silent.discard(server)
        self._acknowledge_if_complete(subscription)

    def _acknowledge_if_complete(self, subscription: Subscription) -> None:
        if not subscription.silent and not subscription.is_acknowledged:
            subscription.is_acknowledged, subscription.due_ns = True, NEVER_NS
            params = {"notifications": subscription.honored, "_meta": {SUBSCRIPTION_KEY: subscription.id}}
            self._client.write_line(notification_line(ACKNOWLEDGED, params))

    def take_answer(self, server: MergedServer, message: RpcMessage) -> None:
        """Note the end of a subscription at one server. The last one ends that of the client."""
        if self.end(server, message.key):
            self._client.write_line(message.line)

    def end(self, server: MergedServer, key: Key | None) -> bool:
        """Note the end of a subscription at one server. Return whether it was the last one."""
        subscription = None if key is None else self._open.get(key)
        if key is None or subscription is None:
            return False
        subscription.open.discard(server)
        subscription.silent.discard(server)
        if subscription.open:
            self._acknowledge_if_complete(subscription)
            return False
        del self._open[key]
        return True

    def announce(self, kinds: Sequence[str]) -> None:
        """Announce changed lists to the subscriptions that ask for them."""
        for subscription in self._open.values():
            for kind in kinds:
                if subscription.honored.get(_FILTERS[kind]):
                    params = {"_meta": {SUBSCRIPTION_KEY: subscription.id}}
                    self._client.write_line(notification_line(f"notifications/{kind}/list_changed", params))

    @property
    def next_due_ns(self) -> int:
        return min((each.due_ns for each in self._open.values()), default=NEVER_NS)

    def check(self, now_ns: int) -> None:
        for subscription in self._open.values():
            if now_ns >= subscription.due_ns:
                subscription.silent.clear()
                self._acknowledge_if_complete(subscription)
