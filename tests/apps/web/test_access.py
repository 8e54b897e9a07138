"""Who may ask what over HTTP: every refusal is a problem with an envelope inside, and nothing was done."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.principal import Role
from shotclock.core.proposal import Kind, ProposalRequest
from shotclock.people.auth import API_RATE, BODY_LIMIT, SMALL_BODY_LIMIT
from shotclock.store.proposals import NewProposal
from shotclock.store.store import Store
from tests.apps.web.serving import ANSWER_WITHIN_S, Served, now, serving
from tests.rows import row

pytestmark = pytest.mark.slow

QUESTION = {"kind": "question", "title": "May I?"}
EVENT_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture(scope="module")
def operator(served: Served) -> str:
    return served.token("olga", Role.OPERATOR)


@pytest.fixture(scope="module")
def agent(served: Served) -> str:
    return served.token("agent-1", Role.AGENT)


def cookie_and_proof(served: Served) -> dict[str, str]:
    answer = served.ask("GET", served.link.removeprefix(served.url))
    assert answer.status == 303, answer.content
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]
    proof = answer.headers["location"].removeprefix("/#proof=")
    return {"Cookie": answer.headers["set-cookie"].split(";")[0], "Shotclock_Proof": proof}


def approval(served: Served, id: str, token: str) -> dict[str, Any]:
    return {"status": "approved", "answer": "yes", "action_hash": served.whole(id, token)["action_hash"]}


def test_a_stream_ends_with_the_token_it_was_opened_with(served: Served, agent: str) -> None:
    token = served.token("leaver", Role.OPERATOR)
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=ANSWER_WITHIN_S)
    try:
        connection.request("GET", "/api/inbox/events", headers={"Authorization": f"Bearer {token}"})
        stream = connection.getresponse()
        assert stream.readline() == b"event: hello\n"
        served.propose(agent, title="Seen")
        while b"Seen" not in stream.readline():
            pass
        served.revoke("leaver")
        served.propose(agent, title="Not seen")
        assert b"Not seen" not in stream.read(), "it goes on telling"
    finally:
        connection.close()


# --- how many ---------------------------------------------------------------------------------------


def test_the_hundred_and_first_open_proposal_of_an_agent_is_refused_and_nobody_elses(
    served: Served, agent: str, validate_envelope: Callable[[Any], Any]
) -> None:
    loop = served.token("loop", Role.AGENT)
    asked = [NewProposal(f"p-loop{n}", ProposalRequest(Kind.QUESTION, f"{n}?"), "loop") for n in range(100)]
    with Store.open(served.home) as store:
        store.proposals.attach_or_create_all(asked, now())
    refused = served.ask("POST", "/api/inbox", {"title": "One more?"}, token=loop)
    assert (refused.status, refused.code) == (429, "INBOX_FULL")
    assert validate_envelope(refused.envelope)["error"]["retryable"]
    assert served.propose(loop, title="7?") == "p-loop7", "the identical call still attaches"
    assert served.propose(agent, title="One more?")
    assert served.ask("POST", "/api/inbox/p-loop7/withdraw", {}, token=loop).status == 200
    assert served.propose(loop, title="One more?")
    with Store.open(served.home) as store:
        for each in store.proposals.list(asked_by="loop"):
            if each.is_open:
                store.proposals.withdraw(each.id, "loop", now())


# --- roles ----------------------------------------------------------------------------------------


def test_an_agent_proposes_and_sees_its_own_and_an_operator_decides(
    served: Served, operator: str, agent: str, validate_envelope: Callable[[Any], Any]
) -> None:
    asked = served.ask("POST", "/api/inbox", QUESTION, token=agent)
    validate_envelope(asked.json)
    assert (asked.status, asked.data["status"]) == (202, "pending")
    id = asked.data["proposal_id"]
    assert served.propose(agent, **QUESTION) == id, "the identical call attaches"
    other = served.token("agent-2", Role.AGENT)
    assert served.ask("GET", f"/api/inbox/{id}", token=other).status == 404
    assert served.ask("GET", f"/api/inbox/{id}/result", token=other).status == 404
    assert served.ask("POST", f"/api/inbox/{id}/withdraw", {}, token=other).status == 404
    assert id not in {each["id"] for each in served.ask("GET", "/api/inbox", token=other).data["proposals"]}
    decided = served.ask("POST", f"/api/inbox/{id}/decision", approval(served, id, operator), token=operator)
    validate_envelope(decided.json)
    assert decided.data["proposal"]["decided_by"] == "olga"
    assert served.result(id, agent)["answer"] == "yes"


def test_an_agent_never_decides(
    served: Served, operator: str, agent: str, validate_envelope: Callable[[Any], Any]
) -> None:
    id = served.propose(agent, **{**QUESTION, "title": "May I decide?"})
    body = approval(served, id, operator)
    for token in (agent, None):  # with its token, and as anybody on this machine
        for path, said in (("decision", body), ("check", body), ("extend", {"by_ms": 1000})):
            answer = served.ask("POST", f"/api/inbox/{id}/{path}", said, token=token)
            assert (answer.status, answer.code) == (403, "NOT_ALLOWED")
            assert answer.headers["content-type"] == "application/problem+json"
            validate_envelope(answer.envelope)
    assert served.result(id, agent)["status"] == "pending"


def test_a_withdrawn_proposal_cannot_be_decided(served: Served, operator: str, agent: str) -> None:
    id = served.propose(agent, **{**QUESTION, "title": "Never mind?"})
    body = approval(served, id, operator)
    assert served.ask("POST", f"/api/inbox/{id}/withdraw", {}, token=agent).data["status"] == "withdrawn"
    assert served.ask("POST", f"/api/inbox/{id}/decision", body, token=operator).code == "PROPOSAL_WITHDRAWN"


def test_a_tool_call_over_mcp_is_made_by_whoever_has_the_token(served: Served, operator: str, agent: str) -> None:
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
    arguments = {"title": "Over MCP?", "justification": "because", "wait_ms": 0}
    params = {"name": "propose", "arguments": arguments, "_meta": meta}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    headers = {
        "Accept": "application/json, text/event-stream",
        "Mcp_Protocol_Version": "2026-07-28",
        "Mcp_Method": "tools/call",
        "Mcp_Name": "propose",
    }
    for token, name in ((agent, "agent-1"), (None, "(anonymous)")):
        said = served.ask("POST", "/mcp", call, token=token, **headers)
        assert b"pending" in said.content, said.content
        found = served.ask("GET", "/api/inbox?status=pending", token=operator).data["proposals"]
        assert name in {each["asked_by"] for each in found if each["title"] == "Over MCP?"}


# --- deciding -------------------------------------------------------------------------------------


def test_of_many_who_decide_at_once_one_wins_and_the_others_are_told_who(served: Served, operator: str) -> None:
    tokens = [served.token(f"racer-{n}", Role.OPERATOR) for n in range(8)]
    id = served.propose(**{**QUESTION, "title": "Who is first?"})
    body = approval(served, id, operator)
    with ThreadPoolExecutor(len(tokens)) as pool:
        answers = list(
            pool.map(lambda token: served.ask("POST", f"/api/inbox/{id}/decision", body, token=token), tokens)
        )
    winners = [n for n, answer in enumerate(answers) if answer.status == 200]
    assert len(winners) == 1
    for n, answer in enumerate(answers):
        if n not in winners:
            assert (answer.status, answer.code) == (409, "ALREADY_DECIDED")
            assert answer.envelope["error"]["context"]["decided_by"] == f"racer-{winners[0]}"


def test_only_what_was_looked_at_is_decided(served: Served, operator: str) -> None:
    id = served.propose(title="Restart it", operation="ops/restart", arguments={"host": "a"})
    path = f"/api/inbox/{id}/decision"
    assert served.ask("POST", path, {"status": "approved"}, token=operator).code == "ARG_ERROR"
    other = served.ask("POST", path, {"status": "approved", "action_hash": "0" * 64}, token=operator)
    assert (other.status, other.code) == (409, "ACTION_CHANGED")


def test_a_modification_is_checked_and_every_mistake_is_named(served: Served, operator: str) -> None:
    schema = {"properties": {"count": {"type": "integer"}, "zone": {"enum": ["a", "b"]}}, "required": ["count"]}
    id = served.propose(title="Scale", operation="ops/scale", arguments={"count": 64}, input_schema=schema)
    wrong = {"status": "modified", "arguments": {"count": "many", "zone": "c"}}
    checked = served.ask("POST", f"/api/inbox/{id}/check", wrong, token=operator).data["errors"]
    assert {each["field"] for each in checked} == {"arguments.count", "arguments.zone"}
    hash = served.whole(id, operator)["action_hash"]
    refused = served.ask("POST", f"/api/inbox/{id}/decision", {**wrong, "action_hash": hash}, token=operator)
    assert (refused.status, refused.envelope["error"]["errors"]) == (422, checked)
    right = {"status": "modified", "arguments": {"count": 16}, "action_hash": hash}
    assert served.ask("POST", f"/api/inbox/{id}/decision", right, token=operator).status == 200
    assert served.result(id)["arguments"] == {"count": 16}


def test_what_makes_no_sense_is_refused(served: Served, validate_envelope: Callable[[Any], Any]) -> None:
    for body in [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"title": NaN}',
        b"{" * 100_000,
        b'{"kind":"wish"}',
        b'{"title":1,"file":[],"policy":3}',
        b'{"title":"x","policy":{"ttl":"soon"}}',
        b'{"title":"x","choices":"ab"}',
        b'{"title":"\\ud800"}',
        b"\xff",
        b'{"title":"x","kind":["file"]}',
        b'{"title":"x","idempotency_key":""}',
    ]:
        with row(body):
            answer = served.ask("POST", "/api/inbox", raw=body)
            assert (answer.status, answer.code) == (422, "ARG_ERROR"), answer.content
            validate_envelope(answer.envelope)


def test_what_is_not_there_is_a_problem_like_any_other(served: Served, validate_envelope: Callable[[Any], Any]) -> None:
    for method, path in (("GET", "/api/nothing"), ("PUT", "/api/inbox/p-x/what"), ("POST", "/api/inbox/p-x/y/z")):
        answer = served.ask(method, path)
        assert (answer.status, answer.code) == (404, "UNKNOWN_OPERATION")
        validate_envelope(answer.envelope)


def test_a_wait_for_a_person_is_bounded_and_ends_with_the_decision(served: Served, operator: str) -> None:
    began = time.monotonic()
    pending = served.ask("POST", "/api/inbox", {**QUESTION, "title": "Anybody?", "wait_ms": 300})
    assert (pending.status, pending.data["status"]) == (202, "pending")
    assert 0.3 <= time.monotonic() - began < 5
    id = pending.data["proposal_id"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.ask, "GET", f"/api/inbox/{id}/result?wait_ms=20000")
        served.ask("POST", f"/api/inbox/{id}/decision", approval(served, id, operator), token=operator)
        assert waiting.result(ANSWER_WITHIN_S).data["status"] == "approved"
    assert time.monotonic() - began < 15


# --- credentials ----------------------------------------------------------------------------------


def test_tokens_that_are_wrong_expired_or_revoked_are_refused(served: Served) -> None:
    short, gone = served.token("short", Role.OPERATOR, ttl_ms=1), served.token("gone", Role.OPERATOR)
    assert served.ask("GET", "/api/inbox", token=gone).data["principal"] == {"name": "gone", "role": "operator"}
    served.revoke("gone")
    wrong = (short, gone, "", "nonsense", gone[:-1] + "x", "shotclock_operator_aaaaaaaa_" + "a" * 43)
    shown = [(token, "/api/inbox") for token in wrong] + [
        (gone, path) for path in ("/mcp", "/health", "/api/inbox/events")
    ]
    for token, path in shown:
        answer = served.ask("GET", path, token=token)
        assert (answer.status, answer.code) == (401, "TOKEN_INVALID"), path
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert served.ask("GET", "/api/inbox", Authorization="Basic eDp5").status == 401


def test_wrong_tokens_are_slowed_down_and_right_ones_are_not(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        right = served.token("olga", Role.OPERATOR)
        statuses = {served.ask("GET", "/api/inbox", token="wrong").status for _ in range(40)}
        assert statuses == {401, 429}
        assert served.ask("GET", "/api/inbox", token=right).status == 200


def test_the_link_works_once_and_then_there_is_another(served: Served) -> None:
    first = served.link
    known = cookie_and_proof(served)
    assert served.ask("GET", "/api/inbox", **known).data["principal"]["role"] == "operator"
    assert served.link != first
    again = served.ask("GET", first.removeprefix(served.url))
    assert (again.status, again.headers["location"]) == (303, "/?key=used")
    assert "set-cookie" not in again.headers


def test_half_a_session_is_none(served: Served) -> None:
    """The cookie goes to every port of this machine; an agent that serves a page of its own may get to see it."""
    known, other = cookie_and_proof(served), cookie_and_proof(served)
    for part in (
        {"Cookie": known["Cookie"]},
        {"Shotclock_Proof": known["Shotclock_Proof"]},
        {**known, "Shotclock_Proof": other["Shotclock_Proof"]},
        {**known, "Cookie": known["Cookie"][:-1] + ("0" if known["Cookie"][-1] != "0" else "1")},
    ):
        assert served.ask("GET", "/api/inbox", **part).data["principal"]["role"] == "agent"


def test_signing_in_with_a_token_lasts_as_long_as_the_token(served: Served, agent: str) -> None:
    refused = served.ask("POST", "/api/inbox/session", {"token": agent})
    assert (refused.status, refused.code) == (403, "NOT_ALLOWED")
    assert served.ask("POST", "/api/inbox/session", {"token": "x"}).status == 401
    token = served.token("nina", Role.OPERATOR)
    answer = served.ask("POST", "/api/inbox/session", {"token": token})
    known = {"Cookie": answer.headers["set-cookie"].split(";")[0], "Shotclock_Proof": answer.data["proof"]}
    assert token not in answer.headers["set-cookie"]
    assert served.ask("GET", "/api/inbox", **known).data["principal"] == {"name": "nina", "role": "operator"}
    served.revoke("nina")
    assert served.ask("GET", "/api/inbox", **known).data["principal"]["role"] == "agent"


def test_whoever_signs_out_is_signed_out_on_the_server_and_nobody_else_is(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        known, other = cookie_and_proof(served), cookie_and_proof(served)
        for part in ({"Cookie": known["Cookie"]}, {**known, "Shotclock_Proof": other["Shotclock_Proof"]}):
            served.ask("DELETE", "/api/inbox/session", **part)
        assert role(served, known) == "operator", "whoever has one half only signs nobody out"
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=ANSWER_WITHIN_S)
        try:
            headers = {name.replace("_", "-"): value for name, value in known.items()}
            connection.request("GET", "/api/inbox/events", headers=headers)
            stream = connection.getresponse()
            assert stream.readline() == b"event: hello\n"
            answer = served.ask("DELETE", "/api/inbox/session", **known)
            assert (answer.status, answer.data) == (200, {"signed_in": False})
            assert "Max-Age=0" in answer.headers["set-cookie"]
            assert (role(served, known), role(served, other)) == ("agent", "operator")
            served.propose(title="Not seen")
            assert b"Not seen" not in stream.read(), "what was open goes on telling"
        finally:
            connection.close()
        served.stop()
        served.start()
        assert (role(served, known), role(served, other)) == ("agent", "operator"), "it was only kept in memory"


def role(served: Served, known: dict[str, str]) -> str:
    return str(served.ask("GET", "/api/inbox", **known).data["principal"]["role"])


# --- names, sizes, rates --------------------------------------------------------------------------


def test_a_foreign_host_is_refused(served: Served) -> None:
    for host in ["evil.example", "127.0.0.1.evil.example", "10.1.2.3", "localhost@evil", "", "[::1", "0.0.0.0"]:
        for path in ["/", "/api/inbox", "/mcp", "/health", "/page/inbox.js"]:
            with row(host, path):
                connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=ANSWER_WITHIN_S)
                connection.putrequest("GET", path, skip_host=True)
                connection.putheader("Host", host)
                connection.endheaders()
                answer = connection.getresponse()
                assert answer.status in (400, 421), "h11 refuses some of them by itself"
                connection.close()


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "https://127.0.0.1.evil.example", "http://127.0.0.1:1", "http://localhost:3000"],
)
def test_a_forged_origin_is_refused_even_with_a_whole_session(served: Served, origin: str) -> None:
    known = cookie_and_proof(served)
    id = served.propose(**{**QUESTION, "title": f"From {origin}?"})
    body = {
        "status": "rejected",
        "action_hash": served.ask("GET", f"/api/inbox/{id}", **known).data["proposal"]["action_hash"],
    }
    answer = served.ask("POST", f"/api/inbox/{id}/decision", body, Origin=origin, **known)
    assert (answer.status, answer.code) == (403, "ORIGIN_REFUSED")
    crossing = served.ask("GET", "/api/inbox", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors", **known)
    assert crossing.status == 403
    assert served.ask("POST", f"/api/inbox/{id}/decision", body, Origin=served.url, **known).status == 200


def test_an_oversized_body_is_refused_before_it_is_read(served: Served, operator: str) -> None:
    for path, limit in (("/api/inbox", BODY_LIMIT), ("/api/inbox/session", SMALL_BODY_LIMIT)):
        with socket.create_connection(("127.0.0.1", served.port), timeout=ANSWER_WITHIN_S) as client:
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {served.url[7:]}\r\nContent-Type: application/json\r\nContent-Length: "
            )
            client.sendall(f"{head}{limit + 1}\r\n\r\n".encode())  # and nothing of it
            assert b" 413 " in client.recv(4096)
        # In pieces it says no length, and is counted.
        with socket.create_connection(("127.0.0.1", served.port), timeout=ANSWER_WITHIN_S) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: {served.url[7:]}\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
            try:
                for _ in range(limit // 0x10000 + 2):
                    client.sendall(piece)
            except OSError:
                pass  # it has hung up on us
            assert b" 413 " in client.recv(4096)
    assert served.ask("GET", "/api/inbox", token=operator).status == 200


def test_a_megabyte_of_file_fits_and_comes_back(served: Served, operator: str) -> None:
    text = 'a "line"\n\u00e9\n' * 80_000
    id = served.propose(
        title="A large file", file={"path": "/x", "proposed": text[: 2**20 - 200_000], "current": text[:900_000]}
    )
    assert served.whole(id, operator)["file"]["proposed"] == text[: 2**20 - 200_000]


def test_whoever_asks_too_often_is_told_when_to_come_back_and_others_are_not_kept_waiting(served: Served) -> None:
    busy, calm = served.token("busy", Role.AGENT), served.token("calm", Role.AGENT)

    def until_refused() -> Any:
        with ThreadPoolExecutor(4) as pool:
            for answer in pool.map(lambda _: served.ask("GET", "/health", token=busy), range(4 * API_RATE[0])):
                if answer.status != 200:
                    pool.shutdown(cancel_futures=True)
                    return answer

    refused = until_refused()
    assert (refused.status, refused.code) == (429, "RATE_LIMITED")
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.envelope["error"]["retry_after_ms"] > 0
    assert served.ask("GET", "/api/inbox", token=calm).status == 200


def test_every_answer_carries_the_headers_that_keep_pages_apart(served: Served) -> None:
    for path in ("/", "/inbox", "/page/inbox.js", "/page/nothing", "/api/inbox", "/api/inbox/p-nothing"):
        headers = served.ask("GET", path).headers
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers
    page = served.ask("GET", "/").content.decode()
    assert "<script>" not in page and " style=" not in page and " on" + "click" not in page


# --- events ---------------------------------------------------------------------------------------


class Reader:
    def __init__(self, served: Served, query: str = "", **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=EVENT_WITHIN_S)
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request("GET", f"/api/inbox/events{query}", headers=said)
        self.response = self._connection.getresponse()

    def next(self, name: str = "proposal") -> Any:
        give_up_at = time.monotonic() + EVENT_WITHIN_S
        fields: dict[str, str] = {}
        while time.monotonic() < give_up_at:
            line = self.response.readline().decode().rstrip("\n")
            if not line:
                if fields.get("event") == name:
                    return {"id": fields.get("id"), **json.loads(fields["data"])}
                fields = {}
            else:
                key, _, value = line.partition(": ")
                fields[key] = value
        raise AssertionError(f"no {name} came")

    def close(self) -> None:
        self._connection.close()


def test_events_go_on_where_they_were_left_and_agents_see_their_own(served: Served, operator: str, agent: str) -> None:
    seq = served.ask("GET", "/api/inbox", token=operator).data["seq"]
    watching = Reader(served, f"?after={seq}", Authorization=f"Bearer {operator}")
    own = Reader(served, f"?after={seq}", Authorization=f"Bearer {agent}")
    assert watching.next("hello")["now"].endswith("Z")
    theirs = served.propose(**{**QUESTION, "title": "Somebody else's?"})
    mine = served.propose(agent, **{**QUESTION, "title": "My own?"})
    first, second = watching.next(), watching.next()
    assert [first["title"], second["title"]] == ["Somebody else's?", "My own?"]
    assert "justification" not in first
    seen = own.next()
    assert (seen["title"], seen["may_decide"]) == ("My own?", False)
    watching.close()
    served.ask("POST", f"/api/inbox/{mine}/withdraw", {}, token=agent)
    back = Reader(served, Last_Event_ID=str(first["seq"]), Authorization=f"Bearer {operator}")
    missed = back.next()
    assert (missed["title"], missed["status"]) == ("My own?", "withdrawn")
    assert served.result(theirs)["status"] == "pending"
    for reader in (own, back):
        reader.close()
    assert served.ask("GET", "/api/inbox/events?after=x", token=operator).code == "ARG_ERROR"


# --- other machines -------------------------------------------------------------------------------


def test_other_machines_are_served_only_with_tokens(tmp_path: Path, shotclock: Callable[..., Any]) -> None:
    home = tmp_path / "home"
    ran = shotclock(
        "serve", "tests.apps.web.shop:app", "--http", "0.0.0.0:0", env={"SHOTCLOCK_HOME": str(home)}, timeout=30
    )
    assert ran.json()["error"]["errors"][0]["field"] == "http"
    assert "token" in ran.json()["error"]["message"]
    bare = Served(home, tmp_path / "log", host="0.0.0.0")
    token, agent = bare.token("olga", Role.OPERATOR), bare.token("far", Role.AGENT)
    with serving(tmp_path, host="0.0.0.0") as served:
        assert "key=" not in served.said(), "the link is for this machine only"
        for path in ("/api/inbox", "/mcp", "/health"):
            assert served.ask("GET", path).code == "TOKEN_INVALID"
        assert served.ask("GET", "/").status == 200, "the page is where one signs in"
        assert served.ask("GET", "/health", token=agent).json["ok"]
        assert served.ask("GET", "/api/inbox", token=token).data["principal"]["role"] == "operator"
        assert served.ask("GET", "/api/inbox", token=token, Host="evil.example").status == 421
        assert served.ask("GET", "/api/inbox", token=token, Host="192.0.2.1").status == 200
        body = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        assert served.ask("POST", "/mcp", body).status == 401


PRICE = {
    "jsonrpc": "2.0", "id": 1, "method": "tools/call",
    "params": {
        "name": "price", "arguments": {"item": "apple"},
        "_meta": {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
        },
    },
}  # fmt: skip
MCP_HEADERS = {
    "Accept": "application/json, text/event-stream", "Mcp_Protocol_Version": "2026-07-28", "Mcp_Method": "tools/call",
    "Mcp_Name": "price",
}  # fmt: skip


def lets_in(served: Served, token: str | None = None, **headers: str) -> set[bool]:
    """Whether the API, a tool and the health page let a request in: one value where they agree."""
    answers = [
        served.ask("GET", "/api/inbox", token=token, **headers),
        served.ask("GET", "/health", token=token, **headers),
        served.ask("POST", "/api/inbox", {"title": "May I?"}, token=token, **headers),
        served.ask("POST", "/mcp", PRICE, token=token, **MCP_HEADERS, **headers),
    ]
    for answer in answers:
        assert answer.status in (200, 202) or (answer.status, answer.code) == (401, "TOKEN_INVALID"), answer
    return {answer.status != 401 for answer in answers}


@pytest.mark.parametrize(
    "header",
    [
        "Forwarded",
        "X_Forwarded_For",
        "X_Forwarded_Proto",
        "X_Forwarded_Host",
        "X_Forwarded_Anything",
        "X_Real_IP",
        "Via",
    ],
)
def test_what_a_proxy_on_this_machine_passes_on_needs_a_token(
    served: Served, operator: str, agent: str, header: str
) -> None:
    forwarded = {header: "203.0.113.9"}
    assert lets_in(served) == {True}
    assert lets_in(served, **forwarded) == {False}
    assert lets_in(served, agent, **forwarded) == {True}
    assert served.ask("GET", "/", **forwarded).status == 200, "the page is where one signs in"


def test_a_link_and_what_was_begun_with_it_are_for_this_machine_only(served: Served) -> None:
    link = served.link
    answer = served.ask("GET", link.removeprefix(served.url), X_Forwarded_For="203.0.113.9")
    assert answer.headers["location"] == "/?key=used"
    assert served.link == link, "and it was not used up"
    known = cookie_and_proof(served)
    assert role(served, known) == "operator"
    assert served.ask("GET", "/api/inbox", X_Forwarded_For="203.0.113.9", **known).status == 401


@pytest.mark.parametrize(
    ("environment", "options"), [({"SHOTCLOCK_HTTP_HOSTS": "inbox.example.com"}, ()), ({}, ("--require-token",))]
)
def test_on_loopback_a_token_can_be_required_of_everybody(
    tmp_path: Path, environment: dict[str, str], options: tuple[str, ...]
) -> None:
    bare = Served(tmp_path / "home", tmp_path / "log")
    operator, agent = bare.token("olga", Role.OPERATOR), bare.token("near", Role.AGENT)
    with serving(tmp_path, environment=environment, options=options) as served:
        assert "key=" not in served.said(), "a link would be a way in without a token"
        hosts = ["127.0.0.1", "localhost", *environment.values()]
        for host in hosts:
            assert lets_in(served, Host=host) == {False}
            assert lets_in(served, agent, Host=host) == {True}
        signed_in = served.ask("POST", "/api/inbox/session", {"token": operator})
        cookie = signed_in.headers["set-cookie"].split(";")[0]
        known = {"Cookie": cookie, "Shotclock_Proof": signed_in.data["proof"]}
        assert role(served, {**known, "X_Forwarded_For": "203.0.113.9"}) == "operator"


def test_a_token_cannot_be_required_where_there_is_none_or_nobody_shows_one(
    tmp_path: Path, shotclock: Callable[..., Any]
) -> None:
    target, home = "tests.apps.web.shop:app", {"SHOTCLOCK_HOME": str(tmp_path / "home")}
    for words, field in ((["--http", "127.0.0.1:0"], "http"), ([], "require-token")):
        ran = shotclock("serve", target, *words, "--require-token", env=home, timeout=30)
        assert (ran.code, [each["field"] for each in ran.json()["error"]["errors"]]) == (2, [field])
    assert "token" in ran.json()["error"]["message"]


# --- the page alone -------------------------------------------------------------------------------


def test_the_page_is_served_without_an_app(tmp_path: Path) -> None:
    with serving(tmp_path, words=("inbox", "serve")) as served:
        assert served.ask("GET", "/").status == 200
        assert served.ask("GET", "/health").json == {"ok": True, "name": "inbox"}
        assert served.ask("POST", "/mcp", PRICE, **MCP_HEADERS).status == 404
        id = served.propose(title="May I?")
        known = cookie_and_proof(served)
        listed = served.ask("GET", "/api/inbox", **known).data
        assert [each["id"] for each in listed["proposals"]] == [id]
        hash = served.ask("GET", f"/api/inbox/{id}", **known).data["proposal"]["action_hash"]
        yes = {"status": "approved", "answer": "yes", "action_hash": hash}
        assert served.ask("POST", f"/api/inbox/{id}/decision", yes).status == 403
        assert served.ask("POST", f"/api/inbox/{id}/decision", yes, **known).status == 200
        assert served.result(id)["status"] == "approved"
        token = served.token("far", Role.AGENT)
        assert served.ask("GET", "/api/inbox", X_Forwarded_For="203.0.113.9").status == 401
        assert served.ask("GET", "/api/inbox", X_Forwarded_For="203.0.113.9", token=token).status == 200


def test_what_keeps_the_page_from_being_served_is_said(tmp_path: Path, shotclock: Callable[..., Any]) -> None:
    home = {"SHOTCLOCK_HOME": str(tmp_path / "home")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = shotclock("inbox", "serve", "--http", f"127.0.0.1:{taken.getsockname()[1]}", env=home, timeout=30)
    assert (ran.code, ran.json()["error"]["code"]) == (4, "ADDRESS_UNAVAILABLE")
    ran = shotclock("inbox", "serve", "--http", "example.com:80", env=home, timeout=30)
    assert (ran.code, ran.json()["error"]["errors"][0]["field"]) == (2, "http")


@pytest.mark.parametrize("words", [("serve", "tests.apps.web.shop:app"), ("inbox", "serve")])
def test_a_store_that_cannot_be_used_is_said_where_tokens_are_looked_for(
    tmp_path: Path, shotclock: Callable[..., Any], validate_envelope: Callable[[Any], Any], words: tuple[str, ...]
) -> None:
    (tmp_path / "home").write_text("no directory")
    home = {"SHOTCLOCK_HOME": str(tmp_path / "home")}
    ran = shotclock(*words, "--http", "0.0.0.0:0", env=home, timeout=30)
    assert validate_envelope(ran.json())["error"]["code"] == "STORE_UNUSABLE"
    assert b"Traceback" not in ran.stderr


def test_serving_without_a_target_says_what_is_missing_and_how_the_page_is_had(shotclock: Callable[..., Any]) -> None:
    ran = shotclock("serve", "--http", "127.0.0.1:0", timeout=30)
    (mistake,) = ran.json()["error"]["errors"]
    assert (ran.code, mistake["field"]) == (2, "target")
    assert "missing TARGET, such as tool.py:app" in mistake["message"]
    assert "shotclock inbox serve" in mistake["message"]
