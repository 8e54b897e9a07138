"""Values as a person is shown them: a secret is `***`, and bound by a digest of what it really is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.redaction import HIDDEN, looks_secret
from .inbox import Inbox


async def hide_secrets(inbox: Inbox, redact: Callable[[str], str], value: Any, place: str, hidden: list[str]) -> Any:
    """Return it without its secrets. Each text that had one is told in `hidden`, by a digest of all of it."""
    if isinstance(value, Mapping):
        shown: dict[str, Any] = {}
        for name, each in value.items():
            label = await hide_secrets(inbox, redact, str(name), f"a name in {place}", hidden)
            if label in shown:  # two that differ in what is hidden
                label = f"{label} ({len(shown)})"
            if place == "environment" and looks_secret(name):  # however short it is
                shown[label] = HIDDEN
                hidden.append(f"{place}.{label}: {await inbox.digest_of_hidden(each)}")
            else:
                shown[label] = await hide_secrets(inbox, redact, each, f"{place}.{label}", hidden)
        return shown
    if isinstance(value, list):
        return [
            await hide_secrets(inbox, redact, each, f"{place}[{number}]", hidden) for number, each in enumerate(value)
        ]
    if isinstance(value, str) and (redacted := redact(value)) != value:
        hidden.append(f"{place}: {await inbox.digest_of_hidden(value)}")
        return redacted
    return value
