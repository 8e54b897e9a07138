"""The process that sends one request or one mail: its task is JSON on stdin, the reason of a failure goes to stdout.

It has no limit of its own that matters: its supervisor kills it after five seconds.
"""

from __future__ import annotations

import json
import os
import smtplib
import ssl
import sys
from collections.abc import Callable, Mapping
from email.header import Header
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import Any

import httpx2

from .entries import REFUSED, TLS_PORT

SOCKET_LIMIT_S = 5.0  # of one operation


def main() -> int:
    task = json.load(sys.stdin)
    send: Callable[[Mapping[str, Any]], str | None] = _send_mail if "mail" in task else _post
    try:
        reason = send(task)
    except (OSError, ValueError) as error:  # also of TLS and of values that no header can hold
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if reason is not None:
        os.write(1, reason.encode(errors="replace"))
    return 0 if reason is None else REFUSED


def _post(task: Mapping[str, Any]) -> str | None:
    headers = [(name, _as_header(text)) for name, text in task["headers"].items()]
    try:
        with (
            httpx2.Client(timeout=SOCKET_LIMIT_S) as client,
            client.stream("POST", task["url"], headers=headers, content=task["body"].encode()) as answer,
        ):
            return None if answer.is_success else f"answered {answer.status_code} {answer.reason_phrase}".rstrip()
    except httpx2.HTTPError as error:
        return str(error) or type(error).__name__
    except httpx2.InvalidURL:
        return "its address is not a URL"


def _as_header(text: str) -> str:
    """Return a text as a header, encoded as in mails (RFC 2047) if it is not ASCII."""
    return text if text.isascii() else Header(text, "utf-8", maxlinelen=sys.maxsize).encode(maxlinelen=0)


def _send_mail(task: Mapping[str, Any]) -> str | None:
    mail, message = task["mail"], EmailMessage()
    message["From"], message["To"], message["Subject"] = mail["from"], mail["to"], mail["subject"]
    message["Date"], message["Message-ID"] = formatdate(localtime=True), make_msgid(domain="shotclock.invalid")
    message.set_content(mail["text"])
    host, port = task["host"], task["port"]
    tls = ssl.create_default_context()
    # Passed as local_hostname: smtplib would resolve it, which can hang.
    own_name = os.uname().nodename
    try:
        server: smtplib.SMTP
        if port == TLS_PORT:
            server = smtplib.SMTP_SSL(host, port, own_name, timeout=SOCKET_LIMIT_S, context=tls)
        else:
            server = smtplib.SMTP(host, port, own_name, timeout=SOCKET_LIMIT_S)
        with server:
            if port != TLS_PORT and task["starttls"]:
                server.starttls(context=tls)
            if task["user"] is not None:
                server.login(task["user"], task["password"])
            refused = server.send_message(message)
    except smtplib.SMTPResponseException as error:
        said = error.smtp_error.decode(errors="replace") if isinstance(error.smtp_error, bytes) else error.smtp_error
        return f"answered {error.smtp_code} {said}"
    except smtplib.SMTPRecipientsRefused as error:
        return f"refused {', '.join(error.recipients)}"
    return f"refused {', '.join(refused)}" if refused else None
