"""The operators' page, in a real Chromium: what they see, decide, and are told.

Screenshots go to tests/apps/web/screenshots (not kept in the repository): look at them after a change of the page.
"""

import asyncio
import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.principal import Principal, Role
from shotclock.core.proposal import Kind, ProposalRequest
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from tests.apps.web.conftest import PHONE, WITHIN_MS, shoot
from tests.apps.web.serving import Served, serving
from tests.wrap.client import wrapped
from tests.wrap.test_policy import SERVER as CATALOGUE_SERVER

playwright = pytest.importorskip("playwright.sync_api")
Page, expect = playwright.Page, playwright.expect

pytestmark = pytest.mark.slow


ROUTES = (
    "\n".join(["# What may leave", "", *(f"- host: service-{n}.example" for n in range(40)), "default: deny"]) + "\n"
)
PROPOSED = ROUTES.replace("service-7.example", "service-7.eu.example").replace(
    "default: deny", "- host: pypi.org\n  methods: [GET]\ndefault: deny"
)
FILE = {
    "title": "Let the build reach PyPI",
    "justification": "Three packages are not in the mirror.\n\nOnly GET, only this host.",
    "file": {"path": "/etc/egress/routes.yaml", "proposed": PROPOSED, "current": ROUTES},
    "policy": {"ttl": "1h"},
}
SCALE = {
    "title": "Scale the workers",
    "justification": "The queue grows.",
    "operation": "ops/scale",
    "arguments": {"count": 64, "zone": "a", "labels": ["x", "y"]},
    "input_schema": {
        "properties": {
            "count": {"type": "integer", "description": "How many there should be."},
            "zone": {"type": "string", "enum": ["a", "b"]},
            "labels": {"type": "array"},
            "force": {"type": "boolean"},
        },
        "required": ["count"],
    },
}
EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<style>*{display:none}</style>{{7*7}}\u202egnp.exe\x00\x1b[31m\u200b"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as server:
        yield server


def row(page: Any, title: str) -> Any:
    return page.locator("li.row", has_text=title)


def notes(page: Any) -> Any:
    return page.get_by_label("Notes", exact=True)


def cleared(served: Served) -> Served:
    """Nothing waits: what other tests left is taken back."""
    for each in served.ask("GET", "/api/inbox?status=pending").data["proposals"]:
        served.ask("POST", f"/api/inbox/{each['id']}/withdraw", {})
    return served


def outcome(page: Any) -> Any:
    return page.locator(".outcome")


# --- by hand --------------------------------------------------------------------------------------


def test_with_the_mouse_a_proposal_is_read_approved_modified_rejected_and_extended(served: Served, opened: Any) -> None:
    page = opened(cleared(served))
    expect(page.get_by_role("heading", name="Nothing waits for you")).to_be_visible()
    expect(page).to_have_title("Inbox · shop")
    shoot(page, "empty")

    # It appears by itself, and is counted.
    id = served.propose(**FILE)
    expect(row(page, FILE["title"])).to_be_visible()
    expect(page).to_have_title("(1) Inbox · shop")
    assert page.locator("#icon").get_attribute("href").startswith("data:image/svg+xml")
    row(page, FILE["title"]).click()
    expect(page.locator(".why")).to_have_text(FILE["justification"])
    expect(page.locator(".dl.new mark")).to_have_text("eu.")
    assert page.locator(".dl.new .code").all_inner_texts() == [
        "- host: service-7.eu.example", "- host: pypi.org", "  methods: [GET]",
    ]  # fmt: skip
    assert page.locator(".dl.gone .code").all_inner_texts() == ["- host: service-7.example"]
    # What the agent says is there is no reason to fold anything away.
    expect(page.locator(".source")).to_contain_text("what the agent said the file held")
    assert page.get_by_role("button", name="unchanged lines").count() == 0
    assert page.locator(".dl.same").count() == len(ROUTES.splitlines()) - 1
    served.propose(**{**SCALE, "policy": {"destructive": True, "ttl": "2h"}, "title": "Delete the old previews"})
    served.propose(title="Which dataset should the nightly job use?", choices=["raw", "cleaned"], policy={"ttl": "4m"})
    expect(page.locator("li.row")).to_have_count(3)
    shoot(page, "diff-light")

    before = served.result(id)["expires_at"]
    page.get_by_role("button", name="Extend").click()
    page.get_by_role("button", name="1 hour").click()
    expect(page.get_by_role("button", name="Approve")).to_be_visible()
    assert served.result(id)["expires_at"] > before
    page.get_by_role("button", name="Approve").click()
    notes(page).fill("Only for today.")
    page.get_by_role("button", name="Approve", exact=True).click()
    expect(outcome(page)).to_contain_text("Approved by you")
    assert served.result(id)["notes"] == "Only for today."
    assert served.result(id)["file"]["text"] == PROPOSED

    # Modified: the operator's text is what the agent gets.
    id = served.propose(**{**FILE, "title": "Once more", "idempotency_key": "once-more"})
    row(page, "Once more").click()
    page.get_by_role("button", name="Modify").click()
    editor = page.get_by_label("New text of /etc/egress/routes.yaml")
    editor.fill(editor.input_value().replace("[GET]", "[GET, HEAD]"))
    expect(page.locator(".dl.new .code").last).to_have_text("  methods: [GET, HEAD]")
    shoot(page, "modify")
    page.get_by_role("button", name="Approve with changes").click()
    expect(outcome(page)).to_contain_text("Approved with changes by you")
    expect(outcome(page).locator(".dl.new .code")).to_have_text("  methods: [GET, HEAD]")
    assert served.result(id)["status"] == "modified"
    assert served.result(id)["file"]["text"] == PROPOSED.replace("[GET]", "[GET, HEAD]")

    id = served.propose(title="Send the newsletter", operation="mail/send", arguments={})
    row(page, "Send the newsletter").click()
    page.get_by_role("button", name="Reject").click()
    notes(page).fill("Not on a Friday.")
    page.get_by_role("button", name="Reject", exact=True).click()
    expect(outcome(page)).to_contain_text("Rejected by you")
    assert (served.result(id)["status"], served.result(id)["notes"]) == ("rejected", "Not on a Friday.")

    # A question's answers are its buttons.
    row(page, "Which dataset").click()
    shoot(page, "question")
    page.get_by_role("button", name="cleaned").click()
    expect(outcome(page)).to_contain_text("Answer: cleaned")

    # What is destructive wants to be typed.
    row(page, "Delete the old previews").click()
    page.get_by_role("button", name="Approve").click()
    page.get_by_label("to confirm").fill("ops/other")
    page.get_by_role("button", name="Approve", exact=True).click()
    expect(page.locator(".bar .error")).to_contain_text("ops/scale")
    shoot(page, "destructive")
    page.get_by_label("to confirm").fill("ops/scale")
    page.get_by_role("button", name="Approve", exact=True).click()
    expect(outcome(page)).to_contain_text("Approved by you")

    page.get_by_role("tab", name="History").click()
    expect(row(page, FILE["title"])).to_be_visible()
    page.get_by_role("button", name="rejected").click()
    expect(row(page, FILE["title"])).to_be_hidden()
    expect(row(page, "Send the newsletter")).to_be_visible()
    page.get_by_role("button", name="rejected").click()
    page.get_by_label("Search").fill("friday")
    expect(page.locator("li.row")).to_have_count(1)
    row(page, "Send the newsletter").click()
    expect(page.locator("blockquote")).to_have_text("Not on a Friday.")
    page.get_by_label("Search").fill("")
    shoot(page, "history")


def test_two_keys_at_once_are_meant_for_what_the_first_has_chosen(served: Served, opened: Any) -> None:
    """Both come before the browser tells the page that its address has changed."""
    cleared(served)
    for number in range(2):
        served.propose(**{**SCALE, "title": f"Scale {number}", "idempotency_key": f"both-{number}"})
    page = opened(served)
    expect(page.locator("li.row")).to_have_count(2)
    page.keyboard.press("j")
    expect(page.locator("#proposal-title")).to_have_text("Scale 0")
    page.evaluate(
        """() => { for (const key of ["j", "r"]) {
             document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })); } }"""
    )
    expect(page.locator("#proposal-title")).to_have_text("Scale 1")
    expect(notes(page)).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("k")
    expect(page.locator("#proposal-title")).to_have_text("Scale 0")
    expect(notes(page)).to_be_hidden()


def test_with_the_keyboard_alone_everything_can_be_decided(served: Served, opened: Any) -> None:
    cleared(served)
    ids = [served.propose(**{**SCALE, "title": f"Scale {n}", "idempotency_key": f"scale-{n}"}) for n in range(4)]
    page = opened(served)
    expect(page.locator("li.row")).to_have_count(4)
    press = page.keyboard.press

    press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()

    press("j")
    expect(page.locator("#proposal-title")).to_have_text("Scale 0")
    press("Enter")
    expect(page.locator("#detail")).to_be_focused()
    press("a")
    page.keyboard.type("fine by me j k r")  # letters are letters while one types
    press("Enter")
    expect(outcome(page)).to_contain_text("Approved by you")
    assert served.result(ids[0])["notes"] == "fine by me j k r"

    # Faster than the network: what a key opens is meant for what was chosen, not for what was shown before it.
    held: list[Any] = []
    page.route(f"**/api/inbox/{ids[1]}", lambda route: held.append(route))
    press("j")
    press("r")
    expect(page.locator("#proposal-title")).to_have_text("Scale 0")
    expect(notes(page)).to_be_hidden()
    give_up_at = time.monotonic() + WITHIN_MS / 1000
    while not held:
        assert time.monotonic() < give_up_at, "nobody asked for what was chosen"
        page.wait_for_timeout(10)
    held[0].continue_()
    expect(page.locator("#proposal-title")).to_have_text("Scale 1")
    expect(notes(page)).to_be_focused()
    page.keyboard.type("no")
    press("Escape")  # not yet; and what was typed is kept
    press("r")
    expect(notes(page)).to_have_value("no")
    press("Enter")
    expect(outcome(page)).to_contain_text("Rejected by you")

    press("j")
    expect(page.locator("#proposal-title")).to_have_text("Scale 2")
    press("m")
    expect(page.get_by_label("count")).to_be_focused()
    press("Control+a")
    page.keyboard.type("lots")
    press("Control+Enter")
    expect(page.locator("[data-field=count]")).to_have_text("this is no number")
    press("Control+a")
    page.keyboard.type("1.5")
    expect(page.locator("[data-field=count]")).to_contain_text("integer")  # the server's own check, while one types
    press("Control+a")
    page.keyboard.type("16")
    expect(page.locator(".dl.new .code")).to_have_text("  count: 16")
    expect(page.locator(".error:not(:empty)")).to_have_count(0)
    shoot(page, "modify-arguments")
    press("Control+Enter")
    expect(outcome(page)).to_contain_text("Approved with changes")
    assert served.result(ids[2])["arguments"] == {"count": 16, "zone": "a", "labels": ["x", "y"]}

    press("j")
    expect(page.locator("#proposal-title")).to_have_text("Scale 3")
    before = served.result(ids[3])["expires_at"]
    press("e")
    expect(page.get_by_role("button", name="1 hour")).to_be_focused()
    press("Enter")
    expect(page.get_by_role("button", name="Approve")).to_be_visible()
    assert served.result(ids[3])["expires_at"] > before
    press("k")
    expect(page.locator("#proposal-title")).to_have_text("Scale 2")
    press("/")
    page.keyboard.type("scale 3")
    press("Enter")
    expect(page.locator("#proposal-title")).to_have_text("Scale 3")
    press("a")
    press("Enter")
    expect(outcome(page)).to_contain_text("Approved by you")


def test_a_destructive_question_without_choices_is_confirmed_and_answered_yes_as_on_the_command_line(
    served: Served, opened: Any
) -> None:
    title = "Drop the users table"
    id = cleared(served).propose(title=title, policy={"destructive": True})
    page = opened(served)
    row(page, title).click()
    expect(page.locator(".body")).to_contain_text("This is a question: the asker gets the answer.")
    expect(page.locator(".action")).to_have_text(f'question: "{title}"')
    page.keyboard.press("a")
    expect(page.get_by_label("to confirm")).to_be_focused()
    page.keyboard.type(title)
    shoot(page, "destructive-question")
    page.keyboard.press("Enter")
    expect(outcome(page)).to_contain_text("Answer: yes")
    assert served.result(id)["answer"] == "yes"


# --- others ---------------------------------------------------------------------------------------


def test_two_operators_decide_at_once_and_the_other_is_told_who_was_first(served: Served, opened: Any) -> None:
    anna = opened(served, served.token("anna", Role.OPERATOR))
    bert = opened(served, served.token("bert", Role.OPERATOR))
    told, race = (served.propose(**{**SCALE, "title": name, "idempotency_key": name}) for name in ("Told", "Race"))

    # Bert is in the middle of his notes when Anna decides: he is told at once, and they are not lost.
    for page in (anna, bert):
        row(page, "Told").click()
        expect(page.locator("#proposal-title")).to_have_text("Told")
    bert.keyboard.press("r")
    notes(bert).fill("I would rather not, because")
    anna.keyboard.press("a")
    anna.keyboard.press("Enter")
    expect(outcome(bert)).to_contain_text("Approved by anna")
    expect(bert.get_by_label("Your notes, not sent")).to_have_value("I would rather not, because")
    expect(bert.locator(".bar")).to_be_hidden()
    shoot(bert, "too-late")

    # Neither knows of the other: both are on their way when the first arrives.
    for page in (anna, bert):
        row(page, "Race").click()
        expect(page.locator("#proposal-title")).to_have_text("Race")
    held: list[Any] = []
    bert.context.route("**/decision", lambda route: held.append(route))
    bert.keyboard.press("r")
    notes(bert).fill("not now")
    bert.keyboard.press("Enter")
    give_up_at = time.monotonic() + WITHIN_MS / 1000
    while not held and time.monotonic() < give_up_at:
        bert.wait_for_timeout(10)
    anna.keyboard.press("a")
    anna.keyboard.press("Enter")
    expect(outcome(anna)).to_contain_text("Approved by you")
    held[0].continue_()
    expect(outcome(bert)).to_contain_text("Approved by anna")
    expect(bert.get_by_label("Your notes, not sent")).to_have_value("not now")
    assert served.result(race)["decided_by"] == served.result(told)["decided_by"] == "anna"


def test_the_page_comes_back_by_itself_when_its_server_was_killed(browser: Any, opened: Any, tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.propose(**SCALE)
        page = opened(served)
        row(page, SCALE["title"]).click()
        page.keyboard.press("a")
        notes(page).fill("half a thou")
        served.kill()
        expect(page.locator("#lost")).to_contain_text("No connection to the server")
        shoot(page, "lost")
        notes(page).press("Enter")
        expect(page.locator(".bar .error")).to_contain_text("Your notes are kept")
        served.start()  # at the same place; the browser is still known
        expect(page.locator("#lost")).to_be_hidden()
        served.propose(**{**SCALE, "title": "After the restart", "operation": "ops/other"})
        expect(row(page, "After the restart")).to_be_visible()
        expect(notes(page)).to_have_value("half a thou")
        notes(page).press("Enter")
        expect(outcome(page)).to_contain_text("Approved by you")


def test_on_a_phone_it_fits_and_can_be_decided(served: Served, opened: Any) -> None:
    served.propose(**{**FILE, "title": "From the phone", "idempotency_key": "phone"})
    served.propose(**{**SCALE, "title": "A much longer title which says in many words what somebody would like to do"})
    page = opened(served, viewport=PHONE, theme="dark")

    def fits() -> bool:
        return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth && scrollX === 0"))

    expect(row(page, "From the phone")).to_be_visible()
    assert fits()
    shoot(page, "phone-list-dark")
    row(page, "From the phone").click()
    expect(page.locator("#proposal-title")).to_be_visible()
    expect(page.locator("nav.list")).to_be_hidden()
    assert fits()
    shoot(page, "phone-diff-dark")
    for button in page.locator(".bar button").all():
        box = button.bounding_box()
        assert box["height"] >= 38, "too small for a thumb"
        assert box["x"] + box["width"] <= PHONE["width"]
    page.get_by_role("button", name="All").click()
    expect(row(page, "From the phone")).to_be_visible()
    row(page, "From the phone").click()
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    shoot(page, "phone-diff-light")
    page.get_by_role("button", name="Approve").click()
    page.get_by_role("button", name="Approve", exact=True).click()
    expect(outcome(page)).to_contain_text("Approved by you")


# --- text is text ---------------------------------------------------------------------------------


def test_markup_and_tricks_in_a_proposal_are_shown_as_text(served: Served, opened: Any) -> None:
    asks: list[dict[str, Any]] = [
        {"title": f"1 {EVIL}"[:200], "justification": EVIL, "operation": EVIL, "arguments": {EVIL: [EVIL], "b": EVIL}},
        {"title": "2 evil file", "justification": EVIL, "file": {"path": EVIL, "proposed": EVIL, "current": ""}},
        {"title": "3 evil question", "choices": [EVIL, "no"], "justification": EVIL},
    ]  # fmt: skip
    for ask in asks:
        served.propose(**ask)
    page = opened(served, theme="dark")
    for number in "123":
        row(page, f"{number} ").filter(has_text=re.compile(rf"^\W*{number} ")).click()
        expect(page.locator("#proposal-title")).to_contain_text(f"{number} ")
        expect(page.locator(".why")).to_contain_text("<script>document.title='owned'</script><img src=x onerror=")
        expect(page.locator(".why .odd")).to_have_text(["U+202E", "U+0000", "U+001B", "U+200B"])
        assert page.locator("#detail img, #detail script, #detail style, #rows img, #rows script").count() == 0
        assert "owned" not in page.title()
        if number == "1":
            shoot(page, "evil-dark")
            page.keyboard.press("m")
            assert page.locator("#detail img, #detail script, #detail style").count() == 0
            page.keyboard.press("Escape")


def test_numbers_are_shown_and_modified_exactly_and_odd_characters_are_marked(served: Served, opened: Any) -> None:
    cleared(served)
    arguments = {
        "account": 9007199254740993, "big": 12345678901234567890, "whole": 7.0,
        "host": "\u0435xample.org\u2800\U000e0041", "inside": {"n": [9007199254740995]}, "rate": 1e21,
    }  # fmt: skip
    id = served.propose(title="Pay", operation="bank/pay", arguments=arguments, justification="x\u00a0y")
    page = opened(served)
    row(page, "Pay").click()
    shown = page.locator(".action")
    for line in ("account: 9007199254740993", "big: 12345678901234567890", "whole: 7.0", "- 9007199254740995", "1e+21"):
        expect(shown).to_contain_text(line)
    assert [odd.inner_text() for odd in shown.locator(".odd").all()] == ["U+0435", "U+2800", "U+E0041"]
    expect(page.locator(".why .odd")).to_have_text("U+00A0")
    # Exactly this text is what the terminal shows, and what the approval is bound to.
    proposal = served.ask("GET", f"/api/inbox/{id}").data["proposal"]
    assert shown.inner_text() == re.sub("<(U[+][0-9A-F]+)>", r"\1", proposal["shown"]["action"])
    assert hashlib.sha256(proposal["shown"]["action"].encode()).hexdigest() == proposal["action_hash"]

    page.get_by_role("button", name="Modify").click()
    expect(page.get_by_label("account")).to_have_value("9007199254740993")
    page.get_by_label("big").fill("12345678901234567891")
    expect(page.locator(".dl.new .code")).to_have_text("  big: 12345678901234567891")
    page.get_by_role("button", name="Edit as JSON").click()
    editor = page.get_by_label("Arguments as JSON")
    assert json.loads(editor.input_value()) == {**arguments, "big": 12345678901234567891}
    page.get_by_role("button", name="Edit as a form").click()
    expect(page.get_by_label("big")).to_have_value("12345678901234567891")
    page.get_by_role("button", name="Approve with changes").click()
    expect(outcome(page)).to_contain_text("Approved with changes by you via HTTP")
    expect(outcome(page).locator(".dl.new .code")).to_have_text("  big: 12345678901234567891")
    made = served.result(id)["arguments"]
    assert made == {**arguments, "big": 12345678901234567891} and type(made["whole"]) is float


def test_a_file_on_this_machine_is_read_by_the_server_and_not_believed(
    served: Served, opened: Any, tmp_path: Path
) -> None:
    cleared(served)
    path = tmp_path / "egress"
    path.write_text("".join(f"allow {n}.example\n" for n in range(60)))
    lie = path.read_text().replace("allow 9.example\n", "allow 9.example\nallow evil.com\n")
    id = served.propose(title="Tidy", file={"path": str(path), "proposed": lie + "allow a.example\n", "current": lie})
    page = opened(served)
    row(page, "Tidy").click()
    expect(page.locator(".contradicts")).to_be_visible()
    assert page.locator(".dl.new .code").all_inner_texts() == ["allow evil.com", "allow a.example"]
    # The decided proposal keeps the comparison that was decided on; a page that did not show it says what is missing.
    page.get_by_role("button", name="Approve").click()
    page.get_by_role("button", name="Approve", exact=True).click()
    expect(outcome(page)).to_contain_text("Approved by you")
    expect(page.locator(".source")).to_have_text("Compared with the file itself, which the server has read.")
    assert page.locator(".dl.new .code").all_inner_texts() == ["allow evil.com", "allow a.example"]
    shoot(page, "file-read-decided")
    page.reload()
    expect(page.locator(".source")).to_contain_text("The file itself is read only while a proposal waits.")
    shoot(page, "file-read-decided-later")
    # It learns nothing by that: what is there is for operators.
    assert "contradicts" in served.ask("GET", f"/api/inbox/{id}").data["proposal"]["shown"]["file"]
    agent = served.token("reader", Role.AGENT)
    asked = served.ask("POST", "/api/inbox", {"title": "x", "file": {"path": str(path), "proposed": ""}}, token=agent)
    seen = served.ask("GET", f"/api/inbox/{asked.data['proposal_id']}", token=agent).data["proposal"]
    assert seen["shown"]["file"]["before"] is None and "allow 9.example" not in json.dumps(seen)


def test_what_was_approved_shows_what_became_of_it(served: Served, opened: Any) -> None:
    cleared(served)

    async def ran(id: str, action_hash: str) -> None:
        with Store.open(served.home) as store:
            inbox = Inbox(store)
            assert await inbox.use(id, action_hash)
            inbox.record_outcome(id, "FILE_UNWRITABLE", "the disk is full")
            await inbox.close()

    async def asked(title: str = "Write it", operation: str = "shop/write") -> Any:
        ask = ProposalRequest(Kind.OPERATION, title, operation=operation, arguments={"n": 1}, dispatched=True)
        with Store.open(served.home) as store:
            inbox = Inbox(store)
            proposal = await inbox.propose(ask, Principal("builder", Role.AGENT))
            await inbox.close()
            return proposal

    proposal = in_thread(asked)
    page = opened(served)
    row(page, "Write it").click()
    expect(page.locator(".action")).to_contain_text('run: "shop/write"')
    page.get_by_role("button", name="Approve").click()
    page.get_by_role("button", name="Approve", exact=True).click()
    expect(outcome(page)).to_contain_text("Approved, waits for the agent to call again")
    expect(outcome(page).locator(".left-text")).to_contain_text("23 h 59 m left")
    shoot(page, "waits-for-the-agent")
    in_thread(lambda: ran(proposal.id, proposal.action_hash))
    expect(outcome(page).locator(".run.failed")).to_contain_text("Failed")
    expect(outcome(page).locator(".run.failed")).to_contain_text("FILE_UNWRITABLE the disk is full")
    assert "carried out" not in page.locator("#detail").inner_text()
    in_thread(lambda: asked("Ship it", "run r7 step ship"))
    row(page, "Ship it").click()
    page.get_by_role("button", name="Approve").click()
    page.get_by_role("button", name="Approve", exact=True).click()
    expect(outcome(page).locator(".run")).to_contain_text("a parked local one with: shotclock run --resume r7")
    shoot(page, "step-approved")


def in_thread(work: Any) -> Any:
    """Playwright has an event loop of its own in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(asyncio.wait_for(work(), 30))).result(60)


def test_differences_are_right_and_bounded(served: Served, opened: Any) -> None:
    page = opened(served)
    compare = """async ([before, after]) => {
        const { compareLines } = await import("/page/difference.js");
        const began = performance.now();
        const { rows, exhausted } = compareLines(before, after);
        const took = performance.now() - began;
        const side = (kind) => rows.filter((row) => row.kind !== kind).map((row) => row.text + "\\n").join("");
        const same = rows.filter((row) => row.kind === "same").length;
        return [side("new") === before && side("gone") === after, same, exhausted, took];
    }"""
    rng, found, there = random.Random(5), 0, 0
    for _ in range(60):
        lines = [rng.choice("abcdefg" if rng.random() < 0.5 else "xy") for _ in range(rng.randrange(30))]
        after = [line for line in lines if rng.random() < 0.8]
        there += len(after)
        for _ in range(rng.randrange(6)):
            after.insert(rng.randrange(len(after) + 1), rng.choice("abcz"))
        right, same, exhausted, _ = page.evaluate(compare, ["".join(f"{x}\n" for x in each) for each in (lines, after)])
        assert right
        assert not exhausted
        found += same
    assert found > there * 0.9, "what is the same is not seen to be"
    # A megabyte with nothing in common but the most annoying lines: given up on in time, and still the truth.
    old = [rng.choice(["{", "}", "", "x"]) for _ in range(200_000)]
    new = [rng.choice(["{", "}", "", "y"]) for _ in range(200_000)]
    right, _, exhausted, took_ms = page.evaluate(compare, ["".join(f"{x}\n" for x in each) for each in (old, new)])
    assert right
    assert exhausted
    assert took_ms < 5_000

    # And on the page, where one line may be all of it.
    text = "".join(f"line {n} {rng.random()}\n" for n in range(12_000))
    huge = {"path": "/huge", "current": text, "proposed": text.replace("line 6000", "LINE 6000") + "x" * 300_000}
    served.propose(title="Huge", file=huge)
    row(page, "Huge").click()
    expect(page.locator(".dl.new .code").first).to_contain_text("LINE 6000")
    assert page.locator(".dl").count() < 100
    expect(page.get_by_role("button", name="show 299000 more characters")).to_be_visible()


def test_a_page_whose_session_has_ended_asks_to_sign_in_and_keeps_what_was_typed(served: Served, opened: Any) -> None:
    title = "Asked before the session ended"
    id = served.propose(title=title, operation="ops/stop", arguments={})
    page = opened(served, served.token("gone-for-lunch", Role.OPERATOR))
    row(page, title).click()
    page.keyboard.press("r")
    page.get_by_label("Notes", exact=True).fill("not before Monday")
    served.revoke("gone-for-lunch")
    page.get_by_role("button", name="Reject").click()
    expect(page.get_by_text("Your session has ended")).to_be_visible()
    shoot(page, "session-ended")
    page.get_by_label("Operator token").fill(served.token("back-again", Role.OPERATOR))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_label("Notes", exact=True)).to_have_value("not before Monday")
    expect(page.locator(".bar .error")).to_be_empty()
    page.get_by_role("button", name="Reject").click()
    expect(page.locator(".outcome")).to_contain_text("Rejected")
    assert served.result(id)["notes"] == "not before Monday"
    # And one that nobody touches learns of it by itself.
    served.revoke("back-again")
    served.propose(title="Something new")
    expect(page.get_by_text("Your session has ended")).to_be_visible()


# --- signing out ----------------------------------------------------------------------------------


def test_a_link_with_a_made_up_proof_signs_nobody_out(served: Served, opened: Any) -> None:
    page = opened(cleared(served))
    other = page.context.new_page()
    other.goto(f"{served.url}/#proof=garbage")
    for each in (other, page):
        expect(each.locator("body")).to_have_attribute("data-state", "ready")
    other.reload()
    expect(other.locator("body")).to_have_attribute("data-state", "ready")
    expect(page.locator("#signin")).to_be_hidden()


def test_signing_out_ends_every_page_of_the_browser_and_the_session_itself(served: Served, opened: Any) -> None:
    page = opened(cleared(served))
    other = page.context.new_page()
    other.goto(served.url)
    expect(other.locator("body")).to_have_attribute("data-state", "ready")
    proof = page.evaluate("localStorage.getItem('proof')")
    (cookie,) = [one for one in page.context.cookies() if one["name"].startswith("shotclock-inbox")]
    known = {"Cookie": f"{cookie['name']}={cookie['value']}", "Shotclock_Proof": proof}
    assert served.ask("GET", "/api/inbox", **known).data["principal"]["role"] == "operator"
    page.get_by_role("button", name="Sign out").click()
    for each in (page, other):
        expect(each.locator("#signin")).to_be_visible()
    assert served.ask("GET", "/api/inbox", **known).data["principal"]["role"] == "agent"


def test_the_page_alone_works_like_that_of_an_app(tmp_path: Path, opened: Any) -> None:
    with serving(tmp_path, words=("inbox", "serve")) as served:
        page = opened(served)
        expect(page).to_have_title("Inbox")
        id = served.propose(**SCALE)
        row(page, SCALE["title"]).click()
        shoot(page, "alone")
        page.get_by_role("button", name="Approve").click()
        page.get_by_role("button", name="Approve", exact=True).click()
        expect(outcome(page)).to_contain_text("Approved by you")
        assert served.result(id)["status"] == "approved"


def test_a_destructive_tool_of_a_third_party_runs_after_its_name_was_typed(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue, record = tmp_path / "catalogue.json", tmp_path / "record.txt"
    tool = {"name": "delete_folder", "description": "Delete a folder.", "annotations": {"destructiveHint": True}}
    catalogue.write_text(json.dumps({"tools": [tool]}))
    command = [sys.executable, CATALOGUE_SERVER, str(catalogue), "--record", str(record)]
    with serving(tmp_path, words=("inbox", "serve")) as served:
        monkeypatch.setenv("SHOTCLOCK_HOME", str(served.home))
        page = opened(served)
        with wrapped("--ask", "destructive", server=command) as client:
            call = client.call("delete_folder", path="/data/old")
            row(page, "delete_folder path=/data/old").click()
            expect(page.locator(".action")).to_contain_text('run: "delete_folder"')
            expect(page.locator(".action")).to_contain_text("catalogue_server.py")
            expect(page.locator(".why")).to_contain_text("The rule 'ask destructive' asks about it.")
            expect(page.locator(".why")).to_contain_text("Delete a folder.")
            shoot(page, "third-party-tool")
            page.get_by_role("button", name="Approve").click()
            page.get_by_label("to confirm").fill("delete_folder")
            assert '"tools/call"' not in record.read_text()
            page.get_by_role("button", name="Approve", exact=True).click()
            assert "delete_folder" in client.receive(call)["result"]["content"][0]["text"]
            expect(outcome(page)).to_contain_text("Succeeded")
    assert record.read_text().count('"tools/call"') == 1
