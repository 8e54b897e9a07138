"""The headers of one conversation with a server over HTTP."""

from __future__ import annotations

from .._mcp_headers import (
    EVENT_TYPE,
    JSON_TYPE,
    METHOD,
    NAME,
    NAMED_BY,
    REVISION,
    SESSION,
    DeclaredHeaders,
    encode_value,
)
from .._messages import REVISION_KEY, RpcMessage

HeaderTexts = dict[str, str]


class ConversationHeaders:
    """The session and the revision. From 2026-07-28 on, every request names the revision."""

    def __init__(self) -> None:
        self.session: str = ""
        self.declared: DeclaredHeaders = DeclaredHeaders()
        self._negotiated = ""
        self._modern = ""  # the revision of a client that names it in every request

    @property
    def is_modern(self) -> bool:
        return bool(self._modern)

    def note_request(self, message: RpcMessage) -> None:
        """Note the revision of a client. It may ask `server/discover` first and greet when that is refused."""
        revision = message.meta.get(REVISION_KEY)
        if message.method == "initialize":
            self.session = self._negotiated = self._modern = ""
        elif isinstance(revision, str):
            self._modern = revision

    def note_greeting(self, result: object) -> None:
        revision = result.get("protocolVersion") if isinstance(result, dict) else None
        self._negotiated = revision if isinstance(revision, str) else ""

    def of_stream(self) -> HeaderTexts:
        """Return the headers of a request without a message."""
        texts = {"Accept": EVENT_TYPE, SESSION: self.session, REVISION: self._negotiated}
        return {name: text for name, text in texts.items() if text}

    def of_message(self, message: RpcMessage) -> HeaderTexts:
        texts = {"Accept": f"{JSON_TYPE}, {EVENT_TYPE}", "Content-Type": JSON_TYPE}
        if not self._modern:
            return self.of_stream() | texts
        texts[REVISION] = encode_value(self._modern)
        if message.method is not None:
            texts[METHOD] = encode_value(message.method)
            name = message.params.get(NAMED_BY.get(message.method, ""))
            if isinstance(name, str):
                texts[NAME] = encode_value(name)
                if message.method == "tools/call":
                    texts |= self.declared.copies(name, message.params.get("arguments"))
        return texts
