"""The entries of `notify`: what is refused, and that no label shows a secret."""

from typing import Any

import pytest

from shotclock.core.validation import Part, ValidationError, field
from shotclock.people.notify.entries import MOST_ENTRIES, Entries, UserEntries

MAIL = {"host": "mail.example", "from": "Shotclock <shotclock@example.com>", "to": "me@example.com"}


class OfFile(Part):
    notify: Entries = field(default=[])


class OfUser(Part):
    notify: UserEntries = field(default=[])


def problem_of(entry: Any, part: type[OfFile] | type[OfUser] = OfFile) -> str:
    with pytest.raises(ValidationError) as refused:
        part.model_validate({"notify": entry if isinstance(entry, list) else [entry]})
    [problem] = refused.value.errors()
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def test_a_mistake_is_refused_with_its_place_and_what_to_write() -> None:
    url = "https://example.com/a"
    for entry, place, message in (
        ({"on": ["faild"], "webhook": url}, "notify.0.on.0", "'failed', 'parked', 'timed_out' or 'ended'"),
        ({"on": ["proposed"], "webhook": url}, "notify.0.on.0", "'ended'"),  # proposals are not a run's
        ({"on": [], "webhook": url}, "notify.0.on", "at least 1"),
        ({"on": ["failed"]}, "notify.0", "give one channel of command, webhook, ntfy, slack, smtp"),
        ({"on": ["failed"], "webhook": url, "slack": url}, "notify.0", "not webhook and slack"),
        ({"on": ["failed"], "telegram": url}, "notify.0.telegram", "not permitted"),
        ({"on": ["failed"], "webhook": "example.com/a"}, "notify.0.webhook", "not the URL of a web server"),
        ({"on": ["failed"], "ntfy": "ftp://example.com"}, "notify.0.ntfy", "not the URL of a web server"),
        ({"on": ["failed"], "slack": "https://me:word@example.com"}, "notify.0.slack", "send it in `headers`"),
        ({"on": ["failed"], "command": []}, "notify.0.command", "at least 1"),
        (
            {"on": ["failed"], "command": ["say", "${TOKEN}"]},
            "notify.0.command",
            "add `env: {TOKEN: ${TOKEN}}`, and read $TOKEN",
        ),
        ({"on": ["failed"], "command": ["say"], "headers": {"A": "b"}}, "notify.0", "`headers` are for"),
        ({"on": ["failed"], "webhook": url, "env": {"A": "b"}}, "notify.0", "`env` is for a command"),
        ({"on": ["failed"], "smtp": {**MAIL, "to": "me"}}, "notify.0.smtp.to.0", "not a mail address"),
        ({"on": ["failed"], "smtp": {**MAIL, "user": "me"}}, "notify.0.smtp", "both `user` and `password`"),
        ([{"on": ["failed"], "webhook": url}] * (MOST_ENTRIES + 1), "notify", "are the most"),
    ):
        problem = problem_of(entry)
        assert problem.startswith(f"{place}: "), (entry, problem)
        assert message in problem, (entry, problem)


def test_a_secret_is_not_kept_in_the_file() -> None:
    url, login = "https://example.com/a", {"user": "me", "password": "opensesame"}
    assert "write it as ${NAME}" in problem_of({"on": ["failed"], "smtp": {**MAIL, **login}})
    header = {"on": ["failed"], "webhook": url, "headers": {"Authorization": "Bearer abc"}}
    assert "write it as ${NAME}" in problem_of(header)
    unencrypted = {**MAIL, **login, "password": "${WORD}", "starttls": False}
    assert "unencrypted" in problem_of({"on": ["failed"], "smtp": unencrypted})


def test_the_users_file_may_ask_about_proposals() -> None:
    [entry] = OfUser.model_validate({"notify": [{"on": ["proposed"], "slack": "${SLACK}"}]}).notify
    assert entry.on == ["proposed"]
    assert "'proposed'" in problem_of({"on": ["nothing"], "slack": "${SLACK}"}, OfUser)


def test_a_label_shows_no_part_of_a_url_that_may_be_secret() -> None:
    for entry, label in (
        ({"slack": "https://hooks.example.com/services/T0/B0/secret"}, "slack hooks.example.com"),
        ({"webhook": "http://127.0.0.1:8080/x?key=secret"}, "webhook 127.0.0.1:8080"),
        ({"ntfy": "${TOPIC}"}, "ntfy (address in a variable)"),
        ({"ntfy": "https://${HOST}/x"}, "ntfy (address in a variable)"),
        ({"smtp": MAIL}, "smtp mail.example:587"),
        ({"command": ["./tell.sh", "secret"]}, "command ./tell.sh"),
    ):
        [made] = OfFile.model_validate({"notify": [{"on": ["failed"], **entry}]}).notify
        assert made.label == label
