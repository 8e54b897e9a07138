"""Who may use a server, decided without one: addresses, names and pages, sessions, links, options of an issuer."""

from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.call import Outcome, admit, answer
from shotclock.core.envelope import Problem
from shotclock.core.errors import Ending
from shotclock.core.limits import Clocks, WallTime
from shotclock.people.addresses import Site, check_reach, parse_address, url_of
from shotclock.people.auth import LASTS_MS, Link, Sessions, is_public, make_response
from shotclock.people.authorisation import read_authorisation, url_problem

NOW = WallTime(1_800_000_000_000)
HERE = ("127.0.0.1", 80)


def test_an_address_is_read_without_looking_names_up() -> None:
    for text, address in (
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        (":65535", ("127.0.0.1", 65535)),
        ("localhost:8", ("127.0.0.1", 8)),
        ("[::1]:8", ("::1", 8)),
    ):
        assert parse_address(text) == address
    for text in ("127.0.0.1", "127.0.0.1:65536", "127.0.0.1:x", "example.com:80", "1.2.3.4:²"):
        with pytest.raises(ValueError):
            parse_address(text)
    assert url_of(("::1", 8), "/a") == "http://[::1]:8/a" and url_of(("1.2.3.4", 8)) == "http://1.2.3.4:8"
    for host, has_tokens, is_required, is_refused in (
        ("127.0.0.1", False, False, False),
        ("127.0.0.1", False, True, True),
        ("127.0.0.1", True, True, False),
        ("0.0.0.0", False, False, True),
        ("0.0.0.0", True, False, False),
    ):
        try:
            check_reach((host, 80), lambda has=has_tokens: has, require_token=is_required)
        except ValueError:
            assert is_refused
        else:
            assert not is_refused


def test_a_server_answers_to_its_own_names_and_pages_and_a_proxy_makes_nobody_local() -> None:
    local, declared = Site.at(HERE, {}), Site.at(HERE, {"SHOTCLOCK_HTTP_HOSTS": "Shop.example, b"})
    everywhere, one = Site.at(("0.0.0.0", 80), {}), Site.at(("10.0.0.1", 80), {}, public_name="pub.example")
    for site, host, answers in (
        (local, "127.0.0.1:99", True),
        (local, "LOCALHOST", True),
        (local, "[::1]:80", True),
        (local, "10.0.0.1", False),
        (local, "shop.example", False),
        (local, "a b", False),
        (local, None, False),
        (declared, "SHOP.example:443", True),
        (everywhere, "10.0.0.9", True),
        (everywhere, "evil.example", False),
        (one, "10.0.0.1", True),
        (one, "10.0.0.2", False),
        (one, "pub.example", True),
    ):
        assert site.answers_to(host) is answers, (site, host)
    assert [each.wants_token for each in (local, declared, everywhere, one)] == [False, True, True, True]
    assert Site.at(HERE, {}, require_token=True).wants_token and local.is_local and not everywhere.is_local
    assert local.is_direct(["host", "accept"]) and not declared.is_direct(["host"])
    assert not local.is_direct(["via"]) and not local.is_direct(["x-forwarded-for"])
    for origin, host, from_here, is_known in (
        ("http://localhost:80", "localhost:80", False, True),
        ("https://Shop.example", "shop.example", False, True),
        ("http://localhost:81", "localhost:80", False, False),
        ("http://localhost:81", "localhost:80", True, True),
        ("http://127.0.0.2", "localhost:80", True, True),
        ("http://evil.example", "localhost:80", True, False),
        ("null", "localhost:80", True, False),
        ("ftp://localhost:80", "localhost:80", False, False),
        ("http://[", "localhost:80", True, False),
    ):
        assert local.knows_page(origin, host, from_here=from_here) is is_known, (origin, from_here)
    assert not everywhere.knows_page("http://localhost:81", "x", from_here=True), "others can reach it"


def test_a_session_needs_both_halves_unchanged_and_ends_in_time(tmp_path: Path) -> None:
    sessions = Sessions(lambda: tmp_path)
    cookie = sessions.begin("ann", NOW, token_id="t")
    proof = sessions.proof(cookie)
    session = sessions.look(cookie, proof, NOW)
    assert session is not None and (session.name, session.token_id, session.expires_at) == ("ann", "t", NOW + LASTS_MS)
    other = sessions.begin("ann", NOW)
    for wrong in ((cookie, sessions.proof(other)), (cookie, ""), (cookie + "x", proof), ("x." + cookie[2:], proof)):
        assert sessions.look(*wrong, NOW) is None
    assert sessions.look(cookie, proof, NOW + LASTS_MS) is None and sessions.look(cookie, proof, NOW + LASTS_MS + -1)
    short = sessions.begin("ann", NOW, until=NOW + 5)
    looks = [sessions.look(short, sessions.proof(short), NOW + after) for after in (4, 5)]
    assert looks[0] is not None and looks[1] is None
    assert Sessions(lambda: tmp_path).look(cookie, proof, NOW) == session, "a restart keeps the key"
    said: list[str] = []
    link = Link(said.append)
    first = link.key
    assert not link.use("other") and link.use(first) and not link.use(first) and said == [link.key] != [first]
    assert all(map(is_public, ("/", "/inbox", "/page/a.js", "/api/inbox/session")))
    assert not any(map(is_public, ("/api/inbox", "/mcp")))


def test_every_mistake_in_the_options_of_an_issuer_is_named() -> None:
    for text, is_secure, is_right in (
        ("https://a.example/x", True, True),
        ("http://a.example", True, False),
        ("http://127.0.0.1:8", True, True),
        ("http://localhost", True, True),
        ("http://a.example", False, True),
        ("https://u@a.example", True, False),
        ("https://a.example?q", True, False),
        ("ftp://a.example", False, False),
        ("https://a.example:x", True, False),
        ("https://a b", True, False),
    ):
        assert (url_problem(text, is_secure=is_secure) is None) is is_right, text
    good: dict[str, Any] = {"issuer": "https://i.example", "resource": "https://r.example/mcp"}
    far = ("10.0.0.1", 80)
    found, mistakes = read_authorisation(far, **good, require_scope=["a"])
    assert mistakes == [] and found is not None
    assert (found.at(far, "/mcp").audience, found.host) == ("https://r.example/mcp", "r.example")
    assert found.metadata_url == "https://r.example/.well-known/oauth-protected-resource/mcp"
    assert read_authorisation(HERE, issuer=good["issuer"])[1] == []
    for address, options, fields in (
        (far, {"audience": "x"}, ["audience"]),
        (None, {"issuer": good["issuer"]}, ["issuer"]),
        (far, {"issuer": good["issuer"]}, ["resource"]),
        (far, {**good, "issuer": "x"}, ["issuer"]),
        (far, {**good, "resource": "x", "audience": "a b"}, ["resource", "audience"]),
        (far, {**good, "require_scope": ["a", '"']}, ["require_scope"]),
    ):
        assert [each["field"] for each in read_authorisation(address, **options)[1]] == fields


def test_an_envelope_is_a_response_with_the_status_of_its_code() -> None:
    outcomes = [Outcome(Ending.FINISHED, data=data) for data in ({"a": 1}, {"status": "pending"})]
    outcomes.append(Outcome(Ending.NOT_STARTED, Problem("RATE_LIMITED", "slow", retry_after_ms=1_001)))
    responses = [make_response(answer(admit("x", Clocks()), each)) for each in outcomes]
    assert [each.status_code for each in responses] == [200, 202, 429]
    assert responses[2].headers["Retry-After"] == "2" and responses[0].headers["Cache-Control"] == "no-store"
    assert responses[2].media_type == "application/problem+json" and b'"status":429' in bytes(responses[2].body)
