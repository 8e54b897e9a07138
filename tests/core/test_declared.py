"""What an App declares, content in results, URI templates, references, words of other tools: a table for each."""

from typing import Any

import pytest

from shotclock.core import content_blocks, foreign_words
from shotclock.core.catalogue import Catalogue, CommandSpec, HandlerReference, Interruption, Operation, SecretParameter
from shotclock.core.content_blocks import Content, blocks_of, describe_block, describe_size, is_block
from shotclock.core.errors import Failure, SideEffects, code_of, effects_of_all, shown_failure
from shotclock.core.limits import Clocks
from shotclock.core.proposal import Policy
from shotclock.core.references import UnsetVariable, fill_in
from shotclock.core.uri_template import LONGEST_URI, check_parameters, check_uri, parse_template

HANDLER = HandlerReference("shop", "pay")


def refused(work: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as found:
        work(*arguments, **named)
    return str(found.value)


def test_an_operation_runs_where_it_can_be_stopped_unless_it_says_otherwise() -> None:
    async def waits() -> None: ...

    assert Operation("a", HANDLER).place == "process" and Operation("a", HANDLER, isolation="shared").place == "shared"
    assert Operation("a", waits, isolation="inline").is_async and not Operation("a", len).is_async
    assert Operation("a", HandlerReference("m", "f", is_async=True), isolation="inline").place == "inline"
    assert "is not async" in refused(Operation, "a", len, isolation="inline")
    assert "use 'shared'" in refused(Operation, "a", len, isolation="loop")
    assert "one of auto, process, shared, inline" in refused(Operation, "a", len, isolation="other")
    assert "needs a name" in refused(Operation, "", len) and "cannot be called" in refused(Operation, "a", 1)
    assert "neither detach nor resume" in refused(Interruption, detach=False)
    assert Interruption(detach=False, resume=True) and Interruption(idle_timeout_ms=1000)
    for name in ("idle_timeout_ms", "max_lifetime_ms"):
        assert f"{name} must be at least 1000" in refused(Interruption, **{name: 999})


def test_who_confirms_a_destructive_command_and_whether_its_answer_may_come_early() -> None:
    for declared, needs in (
        ({}, False),
        ({"destructive": False}, False),
        ({"destructive": True}, True),
        ({"destructive": True, "confirm": False}, False),
        ({"destructive": True, "approval": Policy()}, False),
        ({"destructive": True, "requires_person": "yes"}, False),
    ):
        assert CommandSpec("drop", HANDLER, **declared).needs_confirmation is needs, declared
    early = [CommandSpec("a", HANDLER, **each).may_be_unfinished for each in ({}, {"approval": Policy()})]
    assert early == [False, True] and CommandSpec("a", HANDLER, interruption=Interruption()).may_be_unfinished


def test_a_catalogue_is_plain_data_and_finds_its_commands_as_people_write_them() -> None:
    schema = {"properties": {"to": {"default": 3}, "from": {}}}
    secrets = (SecretParameter("key", "KEY"), SecretParameter("other", "KEY"))
    pay = CommandSpec("pay_now", HANDLER, input_schema=schema, clocks=Clocks(5), secrets=secrets, approval=Policy())
    page = CommandSpec("resource docs://a", HANDLER)
    shop = Catalogue("shop", "1.2", commands=(pay,), served=(page,))
    assert Catalogue.from_plain(shop.to_plain()) == shop and shop.everything == (pay, page)
    for name, found in (("pay_now", pay), ("Pay-Now", pay), ("pay", None), ("resource docs://a", page), ("docs", None)):
        assert shop.find(name) is found, name
    assert (pay.kind, page.kind, pay.defaults, shop.secret_variables) == ("command", "resource", {"to": 3}, ("KEY",))
    assert (pay.operation().clocks, pay.operation().name) == (Clocks(5), "pay_now")
    for written, version in (
        ("1.2.3-rc.1+x", "1.2.3-rc.1+x"),
        ("1.2", "1.2.0"),
        ("1", "1.0.0"),
        ("v1", None),
        ("01", None),
    ):
        assert Catalogue("a", written).semantic_version == version


def test_content_is_shown_as_it_is_only_where_a_block_is_complete() -> None:
    data = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
    for block, is_complete in (
        ({"type": "text", "text": ""}, True),
        ({"type": "text", "text": 1}, False),
        ({"type": "text", "text": "", "more": 1}, False),
        ({"type": "other"}, False),
        (data, True),
        ({**data, "data": ""}, False),
        ({**data, "data": "?"}, False),
        ({**data, "mimeType": None}, False),
        ({"type": "resource_link", "uri": "a:", "name": "a"}, True),
        ({"type": "resource_link", "uri": "a:"}, False),
        ({"type": "resource", "resource": {"uri": "a:", "text": ""}}, True),
        ({"type": "resource", "resource": {"uri": "a:", "blob": "aGk="}}, True),
        ({"type": "resource", "resource": {"uri": "a:"}}, False),
        ({"type": "resource", "resource": {"text": ""}}, False),
        ("text", False),
    ):
        assert is_block(block) is is_complete, block
    assert blocks_of({**data, "annotations": None}) == [data] and blocks_of([1, 2]) is None and blocks_of("a") is None
    assert blocks_of([data, "a", {"b": 1}])[1:] == [{"type": "text", "text": text} for text in ("a", '{"b":1}')]
    assert describe_block(data) == "[image image/png, 2 B]"
    assert (
        describe_block({"type": "resource", "resource": {"uri": "a:", "text": "é"}}) == "[file a:, unknown type, 2 B]"
    )
    assert describe_block({"type": "resource_link", "uri": "a:", "name": "n"}) == "[link n: a:]"
    assert [describe_size(size) for size in (999, 1_000, 999_999, 1_000_000)] == ["999 B", "1 kB", "1000 kB", "1.0 MB"]
    assert Content({"type": "text", "text": "a", "x": None}) == Content({"type": "text", "text": "a"}) != Content(data)
    holds, mentions = content_blocks.holds_content, content_blocks.mentions_content
    assert (
        holds([1, Content(data)]) and not holds([data]) and mentions(list[Content] | None) and not mentions(list[str])
    )


def test_a_template_gives_decoded_values_that_stay_inside_their_folder() -> None:
    one, deep = parse_template("notes://{id}/x"), parse_template("files://{path*}{?a,b}")
    for template, uri, values in (
        (one, "notes://a%20b/x", {"id": "a b"}),
        (one, "notes://a/b/x", None),
        (one, "notes://a%2Fb/x", None),
        (one, "notes://%2E%2E/x", None),
        (one, "notes://./x", None),
        (one, "notes://a%00/x", None),
        (one, "notes://a%5Cb/x", None),
        (deep, "files://a/b", {"path": "a/b"}),
        (deep, "files://a/../b", None),
        (deep, "files:///etc", None),
        (deep, "files://a?b=1", {"path": "a", "b": "1"}),
        (deep, "files://a?b=", {"path": "a", "b": ""}),
        (deep, "files://a?c=1", None),
        (deep, "files://a?b=1&b=2", None),
        (deep, "files://" + "a" * (LONGEST_URI - 7), None),
    ):
        assert template.match(uri) == values, uri
    assert deep.match("files://" + "a" * (LONGEST_URI - 8)) and deep.text == "files://{+path}{?a,b}"
    for wrong in (
        "{id}",
        "a://{",
        "a://}",
        "a://{x}{y}",
        "a://{+x}/{y}",
        "a://{?q}/x",
        "a://{x}/{x}",
        "a://{1}",
        "a://{?}",
    ):
        refused(parse_template, wrong)
    refused(check_uri, "readme")
    check_parameters(deep, {"path": True, "a": False, "b": False, "more": False})
    without, required, more = {"a": False, "b": False}, {"path": True, "a": True, "b": False}, {"x": True}
    for parameters in (without, required, {"path": True, **without, **more}):
        refused(check_parameters, deep, parameters)


def test_effects_of_parts_a_failures_code_and_the_variables_of_a_file() -> None:
    none, partial, complete, unknown = SideEffects
    for parts, ended_well, effects in (
        ([], True, none),
        ([none, none], False, none),
        ([complete, none], True, complete),
        ([complete], False, partial),
        ([complete, partial], True, partial),
        ([partial, unknown], True, unknown),
    ):
        assert effects_of_all(parts, ended_well=ended_well) is effects, parts
    assert [code_of(each) for each in (FileNotFoundError(), ValueError())] == ["NOT_FOUND", "INTERNAL_ERROR"]
    shown = shown_failure(KeyError("k"), (KeyError,))
    assert isinstance(shown, Failure) and shown.context == {"exception": "KeyError"}
    assert shown_failure(error := KeyError(), (ValueError,)) is error
    for text, filled in (("${A}", "1"), ("${B:-x}", "x"), ("${B-x}", ""), ("${C-x}", "x"), ("$A ${A", "$A ${A")):
        assert fill_in(text, {"A": "1", "B": ""}) == filled, text
    with pytest.raises(UnsetVariable, match="C"):
        fill_in("${C}", {})


def test_a_word_of_another_tool_or_a_near_one_is_explained() -> None:
    for word, known, table, words, meant in (
        ("click", [], "shotclock", (), (None, "write shotclock ui click")),
        ("x", [], "shotclock", ("execute",), (None, "write shotclock ui exec")),
        ("--desc", ["--label"], "", (), ("--label", "write --label")),
        ("--selector", ["--label"], "", (), (None, "write --text, --id, …")),
        ("--desc", [], "", (), (None, "")),
        ("--IDEL", ["--idle", "-t"], "", (), ("--idle", "did you mean --idle?")),
    ):
        assert foreign_words.explain(word, known, table, words) == meant, word
