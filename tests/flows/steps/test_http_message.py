"""What is decided about a request and its response without a server."""

from typing import Any

import httpx2
import pytest

from shotclock.flows.steps import http_message
from shotclock.flows.steps.http_message import HttpRequest, InvalidRequest


def request(**settings: Any) -> HttpRequest:
    return HttpRequest.of({"url": "http://h", **settings})


def test_a_request_is_sent_as_written_or_refused_with_the_name_of_its_field() -> None:
    plain = request(method="post", body={"a": 1}, params={"n": 1, "l": [1, 2]}, headers={"X": " v "})
    assert (plain.method, plain.content, plain.params) == ("POST", b'{"a": 1}', {"n": "1", "l": [1, 2]})
    assert plain.headers == [(b"X", b"v"), (b"Content-Type", b"application/json")]
    assert request(body="text").headers == [] and request(body={}, headers={"content-TYPE": "x"}).headers[1:] == []
    for method, mutates, is_idempotent in (("GET", False, True), ("PUT", True, True), ("POST", True, False)):
        assert (request(method=method).mutates, request(method=method).is_idempotent) == (mutates, is_idempotent)
    for field, wrong in (
        ("url", ("h", "ftp://h", "http://", "http://h:0", "http://h:65536")),
        ("method", ("CONNECT", "a b")),
        ("headers", ({"a b": "x"}, {"a": "x\ny"}, {"Content-Length": "1", "transfer-encoding": "x"})),
        ("output_file", ("", "a\0")),
        ("", ()),
    ):
        for written in wrong:
            with pytest.raises(InvalidRequest, match=f"^{field}"):
                request(**{field: written})
    with pytest.raises(InvalidRequest) as found:
        request(headers={"X-Key": "hidden\r\nX: y"})
    assert "X-Key" in str(found.value) and "hidden" not in str(found.value)
    for unsendable in ({"max_body_bytes": "many"}, {"body": float("nan")}, {"headers": [1]}):
        with pytest.raises(InvalidRequest, match="a value that cannot be sent"):
            request(**unsendable)
    secret = request(headers={"Authorization": "Bearer hidden-1", "n": "abc"})
    assert secret.without_secrets("hidden-1 abc http://u:p@h") == "*** abc http://***@h"
    written = {"url": "{{x}}", "method": "a b", "headers": {"a b": "c"}}
    flaws = http_message.find_written_flaws(written, lambda text: "{{" in text)
    assert [key for key, _ in flaws] == ["method", "headers"]
    assert http_message.show_url(httpx2.URL("https://u:p@h:8/a?q#f")) == "https://h:8/a"


def test_retry_after_is_seconds_or_a_date_and_has_an_end() -> None:
    day_ms = 24 * 3600 * 1000
    for written, ms in (
        ("3", 3_000),
        ("0", 0),
        ("99999999999999", day_ms),
        ("Thu, 01 Jan 1970 00:00:12 GMT", 2_000),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0),
        ("Fri, 01 Jan 2100 00:00:00 GMT", day_ms),
        *((nonsense, None) for nonsense in ("soon", "-1", "1.5", "٣", "Mon, 99 Foo 2026 99:99:99 GMT")),
        ("", None),
    ):
        assert http_message.retry_after_ms({"retry-after": written}, 10.0) == ms, written
    assert http_message.retry_after_ms({}, 0) is None
