"""The link of a notification, opened in a real browser: it leads to the proposal, and is no key by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.principal import Role
from tests.apps.web.serving import ANSWER_WITHIN_S, serving
from tests.people.notify.servers import web_server

expect: Any = pytest.importorskip("playwright.sync_api").expect

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]


def notified_link(home: Path, page: str, folder: Path, environment: dict[str, str]) -> str:
    """Propose something, and return the link in the message about it."""
    with web_server() as taken:
        config = folder / "shotclock" / "config.toml"
        config.parent.mkdir()
        config.write_text(f'page = "{page}"\n[[notify]]\non = ["proposed"]\nwebhook = "{taken.url}"\n')
        environment = {**environment, "SHOTCLOCK_HOME": str(home), "XDG_CONFIG_HOME": str(folder)}
        words = ["inbox", "propose", "--as", "builder", "--title", "Drop the old index", "--wait", "0"]
        argv = [sys.executable, "-m", "shotclock", *words]
        subprocess.run(argv, env=environment, stdout=subprocess.DEVNULL, timeout=ANSWER_WITHIN_S)
        [request] = taken.items
    return str(json.loads(request.body)["link"])


def test_the_link_of_a_notification_opens_the_page_at_the_proposal(tmp_path: Path, browser: Any, opened: Any) -> None:
    with serving(tmp_path, words=("inbox", "serve")) as served:
        token = served.token("anna", Role.OPERATOR)
        known = opened(served)  # signed in by the link that the server printed
        link = notified_link(served.home, served.url, tmp_path, dict(os.environ))
        page = known.context.new_page()
        page.goto(link)
        expect(page.get_by_role("heading", name="Drop the old index")).to_be_visible()
        expect(page.get_by_role("button", name="Answer")).to_be_visible()

        stranger = browser.new_context().new_page()
        stranger.goto(link)
        expect(stranger.locator("#signin")).to_be_visible()
        expect(stranger.get_by_text("Drop the old index")).to_have_count(0)
        stranger.get_by_label("Operator token").fill(token)
        stranger.get_by_role("button", name="Sign in").click()
        expect(stranger.get_by_role("heading", name="Drop the old index")).to_be_visible()
        stranger.context.close()

        stranger = browser.new_context().new_page()
        stranger.goto(link)
        expect(stranger.locator("#signin")).to_be_visible()
        stranger.goto(served.link)
        expect(stranger.get_by_role("heading", name="Drop the old index")).to_be_visible()
        assert stranger.url == link
        stranger.context.close()
