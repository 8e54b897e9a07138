"""Declarations of resources, prompts and completions: mistakes are refused at import."""

from collections.abc import Callable
from typing import Any

import pytest

from shotclock import App
from shotclock.core.catalogue import Catalogue
from shotclock.core.uri_template import parse_template


def test_mistakes_are_refused_where_they_are_written() -> None:
    app = App("served-mistakes")

    @app.resource("docs://one")
    def one() -> str:
        return "1"

    @app.prompt
    def ask() -> str:
        return "?"

    def two(id: str, more: str = "") -> str:
        return id + more

    mistakes: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: app.resource("docs://one")(one), ValueError, "already has the resource docs://one"),
        (lambda: app.resource("readme")(one), ValueError, "begins with a scheme"),
        (lambda: app.resource(one), TypeError, "needs a URI"),  # type: ignore[arg-type]
        (lambda: app.resource("a://b")(two), ValueError, "put {id} into 'a://b'"),
        (lambda: app.resource("a://{id}/{other}")(two), ValueError, "{other} .* is no parameter"),
        (lambda: app.resource("a://{more}")(two), ValueError, "'id' is not in the URI"),
        (lambda: app.resource("a://{?id}")(two), ValueError, "'id' is optional in the URI"),
        (lambda: app.resource("a://{id")(two), ValueError, "no partner"),
        (lambda: app.resource("a://{id}{more}")(two), ValueError, "a text has to be between"),
        (lambda: app.resource("a://{/id}")(two), ValueError, "an expression is"),
        (lambda: app.resource("a://{+id}/{more}")(two), ValueError, "only a query may follow"),
        (lambda: app.resource("a://{id}/{id}")(two), ValueError, "twice|redefinition"),
        (lambda: app.resource("a://x", timeout="soon")(one), ValueError, "soon"),
        (lambda: app.resource("a://x", colour="red")(one), TypeError, "no option 'colour'"),  # type: ignore[call-arg]
        (lambda: app.resource("a://x", icons=["x.png"])(one), ValueError, "an http: or data: URL"),
        (lambda: app.resource("a://x", icons=[{"url": "x"}])(one), ValueError, "an icon has src"),
        (lambda: app.resource("a://x", isolation="inline")(one), ValueError, "is not async"),
        (lambda: app.prompt(ask), ValueError, "already has the prompt ask"),
        (lambda: app.prompt("a b")(ask), ValueError, "a prompt's name"),
        (lambda: app.prompt(mime_type="text/plain")(ask), TypeError, "no option 'mime_type'"),
        (lambda: app.completion("ask")(ask), TypeError, "the name of its argument"),
        (lambda: app.completion("ask", "x", title="y")(ask), TypeError, "no option 'title'"),
        (lambda: App("pages", list_page_size=0), ValueError, "list_page_size"),
    ]
    for make, kind, words in mistakes:
        with pytest.raises(kind, match=words):
            make()


def test_a_completion_of_an_argument_that_is_not_there_is_named_where_the_app_is_served() -> None:
    app = App("idle")

    @app.completion("ask", "topic")
    @app.completion("ask", "tpoic")
    @app.completion("docs://{id}", "id")
    @app.completion("docs://{name}", "name")
    @app.completion
    def complete(value: str = "") -> list[str]:
        return []

    @app.prompt
    def ask(topic: str) -> str:
        return topic

    @app.resource("docs://{id}")
    def document(id: str) -> str:
        return id

    named = [note.partition(" completes nothing")[0] for note in app.describe().notes]
    assert named == ["idle: completion docs://{name} name", "idle: completion ask tpoic"]


def test_they_are_no_commands_and_survive_the_catalogue() -> None:
    app = App("served-catalogue", list_page_size=7)

    @app.command(title="A title", icons=["https://example.org/i.png"], open_world=False, description="Words.")
    def work() -> int:
        return 1

    @app.resource("docs://{id}", mime_type="text/plain", concurrency=2)
    def doc(id: str) -> str:
        return id

    catalogue = app.catalogue()
    assert [spec.name for spec in catalogue.commands] == ["work"]
    assert Catalogue.from_plain(catalogue.to_plain()) == catalogue
    found = catalogue.find("resource docs://{id}")
    assert found is not None and (found.kind, found.mutates, found.concurrency) == ("resource", False, 2)
    assert doc("x") == "x", "the function itself is unchanged"


def test_a_template_matches_in_linear_time_and_never_leads_out_of_a_folder() -> None:
    template = parse_template("a://{x}-{y}/{+rest}{?q}")
    assert template.match("a://1-2-3/b/c?q=%20") == {"x": "1", "y": "2-3", "rest": "b/c", "q": " "}
    assert template.match("a://1-2/b") == {"x": "1", "y": "2", "rest": "b"}
    for uri in ("a://1/b", "a://-2/b", "a://1-2/", "a://1-2/b?p=1", "a://1-2/b?q=1&q=2", "a://1-%2e%2e/b", "b://1-2/b"):
        assert template.match(uri) is None, uri
    for hostile in (
        "a://1-2/../x",
        "a://1-2/x/..",
        "a://1-2/%2Fetc",
        "a://1-2/a%00",
        "a://1-2/a%5C..%5Cb",
        "a://1-./b",
    ):
        assert template.match(hostile) is None, hostile
    many = parse_template("a://" + "-".join(f"{{p{number}}}" for number in range(50)))
    assert many.match("a://" + "-" * 8000) is None
