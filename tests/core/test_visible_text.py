"""The text of an action: exact, with everything in it to be seen, so that no two actions share an approval."""

import base64
import json
import unicodedata
from typing import Any
from urllib.parse import quote

from hypothesis import example, given
from hypothesis import strategies as st

from shotclock.core.json_values import of_json, to_json
from shotclock.core.proposal import Kind, ProposalRequest, ProposedFile
from shotclock.core.value_types import replace
from shotclock.core.visible_text import (
    HIDDEN,
    Redaction,
    hide_credentials,
    hide_values,
    is_secret_header,
    looks_secret,
    one_line,
    text_of,
    visible,
)
from shotclock.people.proposal_checks import problems_with
from tests.rows import row

# Everything that the text itself is written with, what marks look like, and what must not be seen for something else.
SYNTAX = "ab17eE.:|- \n\t\"'\\<>U+20{}[]#,\u202e\u00a0\ufe0f\u0435\u2800\ud800"
tricky = st.text(alphabet=SYNTAX, max_size=8)
anything = st.text(st.characters(), max_size=6)
numbers = st.one_of(st.integers(), st.sampled_from([2**53, 2**53 + 1, -0.0, 0.0, 7, 7.0, 1e16, 10**16]), st.floats(
    allow_nan=False, allow_infinity=False))  # fmt: skip
leaves = st.one_of(st.none(), st.booleans(), numbers, tricky, anything, st.sampled_from(["7", "7.0", "true", "null"]))
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tricky, inner, max_size=3), max_leaves=8
)
named = st.dictionaries(st.one_of(st.sampled_from(["a", "b", "env", "cwd"]), tricky), values, max_size=3)
asks = st.builds(
    lambda operation, arguments, surroundings, dispatched: ProposalRequest(
        Kind.OPERATION, "t", operation=operation, arguments=arguments, surroundings=surroundings, dispatched=dispatched
    ),
    st.one_of(st.just("shop/pay"), tricky),
    st.none() | named,
    st.none() | named,
    st.booleans(),
)


def strict(value: Any) -> Any:
    """Equal exactly where JSON would be: 7, 7.0, "7" and true are four values, and so are 0.0 and -0.0."""
    if isinstance(value, dict):
        return ("object", tuple((name, strict(each)) for name, each in value.items()))
    if isinstance(value, list | tuple):
        return ("array", tuple(map(strict, value)))
    return (type(value).__name__, repr(value))


def done(ask: ProposalRequest) -> Any:
    def by_name(named: Any) -> Any:
        return None if named is None else strict(dict(sorted(named.items())))

    where = by_name(ask.surroundings) if ask.surroundings else None
    return (
        ask.dispatched,
        ask.operation,
        by_name(ask.arguments),
        where,
        ask.file and (ask.file.path, ask.file.proposed),
    )


@given(asks, asks)
def test_two_actions_that_differ_in_anything_never_share_a_hash(one: ProposalRequest, other: ProposalRequest) -> None:
    assert (one.action_hash == other.action_hash) == (done(one) == done(other)), (one.text, other.text)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """The same value but for one place, and there it is nearly the same."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(value)))
        return {**value, name: draw(changed(value[name]))}
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(changed(value[at])), *value[at + 1 :]]
    others: list[Any] = [str(value), [value], {"a": value}, None, text_of({"a": value}) if value != [] else "[]"]
    if isinstance(value, str):
        others += [
            value + " ",
            value + "\n",
            value + "\ufe0f",
            value.replace("e", "\u0435"),
            visible(value),
            value[::-1],
        ]
        others += [f"{value}\n| {value}", json.dumps(value)]
    if isinstance(value, bool | int | float):
        others += [value + 1, float(value) if abs(value) < 1e300 else 0, bool(value), -value]
    if isinstance(value, list):
        others += [value[::-1], {str(at): each for at, each in enumerate(value)}]
    if isinstance(value, dict):
        others += [dict(reversed(value.items())), list(value.values()), {**value, "extra": None}]
    return draw(st.sampled_from(others))


@given(st.data(), named, named)
def test_what_is_changed_in_one_place_is_another_action(data: st.DataObject, arguments: Any, surroundings: Any) -> None:
    ask = ProposalRequest(
        Kind.OPERATION, "t", operation="shop/pay", arguments=arguments, surroundings=surroundings, dispatched=True
    )
    field = data.draw(st.sampled_from(["arguments", "surroundings"]))
    near = data.draw(changed({"arguments": arguments, "surroundings": surroundings}[field]))
    if not isinstance(near, dict) or (field == "surroundings" and not near and not surroundings):
        return
    other = replace(ask, **{field: near})
    assert (ask.action_hash == other.action_hash) == (done(ask) == done(other)), (ask.text, other.text)


def test_these_are_not_the_same() -> None:
    table: list[Any] = [
        ({"a": 7}, {"a": "7"}),
        ({"a": 7}, {"a": 7.0}),
        ({"a": 1}, {"a": True}),
        ({"a": 2**53}, {"a": 2**53 + 1}),
        ({"a": None}, {}),
        ({"a": ""}, {"a": None}),
        ({"a": []}, {"a": {}}),
        ({"a": ["x", "y"]}, {"a": ["y", "x"]}),
        ({"a": ["x y"]}, {"a": ["x", "y"]}),
        ({"a": {"b": 1}}, {"a.b": 1}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 2, "b": 1}}),
        ({"a": 'x"\n  b: "y'}, {"a": "x", "b": "y"}),
        ({"a": "x\n| y"}, {"a": "x\ny"}),
        ({"a": "\u202e"}, {"a": "<U+202E>"}),
        ({"a": "<U+202E>"}, {"a": "<U+003C>U+202E>"}),
        ({"a": "example.org"}, {"a": "\u0435xample.org"}),
        ({"a": "x"}, {"a": "x\ufe0f"}),
        ({"a": "\u00e9"}, {"a": "e\u0301"}),
        ({"a": "x \ny"}, {"a": "x\ny"}),
    ]
    for one, other in table:
        with row(one, other):
            hashes = {
                ProposalRequest(Kind.OPERATION, "t", operation="o", arguments=each).action_hash for each in (one, other)
            }
            assert len(hashes) == 2


def test_another_text_path_or_command_is_another_file() -> None:
    ask = ProposalRequest(
        Kind.FILE, "t", file=ProposedFile("/a", "x\n"), surroundings={"command": "shop/save"}, dispatched=True
    )
    others = [
        replace(ask, file=ProposedFile("/b", "x\n")),
        replace(ask, file=ProposedFile("/a", "x")),
        replace(ask, file=ProposedFile("/a", "x\r\n")),
        replace(ask, surroundings={"command": "shop/publish"}),
    ]
    assert len({each.action_hash for each in (ask, *others)}) == 5


@given(asks)
def test_what_is_stored_has_the_text_and_the_hash_it_had(ask: ProposalRequest) -> None:
    if problems_with(ask):
        return
    again = of_json(ProposalRequest, json.loads(json.dumps(to_json(ask))))
    assert (again.text, again.action_hash) == (ask.text, ask.action_hash)


def test_the_text_reads_like_this() -> None:
    ask = ProposalRequest(
        Kind.OPERATION,
        "t",
        operation="shop/pay",
        arguments={"to": "ann", "amount": 9007199254740993, "note": "one\ntwo ", "tags": ["a", {"b": []}], "rate": 7.0},
        surroundings={"directory": "/srv", "environment": {"PATH": "/bin", "odd name": "\u202e"}},
        dispatched=True,
    )
    assert ask.text == "\n".join([
        'run: "shop/pay"',
        "with:",
        "  amount: 9007199254740993",
        "  note: |",
        "    | one",
        "    | two<U+0020>",
        "  rate: 7.0",
        "  tags:",
        '    - "a"',
        "    -",
        "      b: []",
        '  to: "ann"',
        "where:",
        '  directory: "/srv"',
        "  environment:",
        '    PATH: "/bin"',
        '    "odd name": "<U+202E>"',
    ])  # fmt: skip


# --- what cannot be seen --------------------------------------------------------------------------


@given(st.text(st.characters()))
@example("<U+202E>")
@example("<<U+<U+003C>\u202e")
def test_what_is_marked_can_be_read_back_exactly(text: str) -> None:
    import re

    assert re.sub("<U\\+([0-9A-F]{4,6})>", lambda found: chr(int(found[1], 16)), visible(text)) == text


def test_what_cannot_be_seen_or_looks_like_ascii_is_shown_by_its_number() -> None:
    table = (
        "\x00 \x1b \x7f \x85 \r \u00a0 \u00ad \u034f \u061c \u115f \u1160 \u17b4 \u180b \u180e \u180f \u200b \u200c "
        "\u200d \u200e \u2028 \u202e \u2060 \u2066 \u2800 \u3000 \u3164 \ufe01 \ufe0f \ufeff \uffa0 \ufff9 \ud800 "
        "\ue000 \u0338 \u20dd \u0301 \uff21 \u212a \u037e \u2010 \u2215 \ufb01 \U0001d41e \U0001d173 \U0001bca0 "
        "\U000e0020 \U000e007f \U000e0100 \U00010ffff"
    )
    for odd in table[:-1].split(" "):
        with row(odd):
            assert visible(f"exam{odd}ple.org") == f"exam<U+{ord(odd):04X}>ple.org"


def test_letters_that_pose_as_latin_ones_are_shown_by_their_number() -> None:
    table: list[Any] = [
        ("\u0435xample.org", "<U+0435>xample.org"),
        ("ex\u0430mple.org and more", "ex<U+0430>mple.org and more"),
        ("\u0440\u0430\u0443", "<U+0440><U+0430><U+0443>"),
        (
            "\u0441 \u0441\u0435\u0440\u0432\u0435\u0440\u0430 \u0440\u0430\u0443.com",
            "\u0441 \u0441\u0435\u0440\u0432\u0435\u0440\u0430 <U+0440><U+0430><U+0443>.com",
        ),
        ("\u0391BC", "<U+0391>BC"),
        ("\u13e2ome", "<U+13E2>ome"),
        ("\u057d\u0585", "<U+057D><U+0585>"),  # Armenian
        ("\u13e2\u13aa\u13bd", "<U+13E2><U+13AA><U+13BD>"),  # Cherokee
        ("\uab72\uab83", "<U+AB72><U+AB83>"),
        ("\ua4d1\ua4ee\ua4ec", "<U+A4D1><U+A4EE><U+A4EC>"),  # Lisu
        ("\u2c9e\u2c9f", "<U+2C9E><U+2C9F>"),  # Coptic
        ("\u146d\u15c5", "<U+146D><U+15C5>"),  # Canadian syllables
        ("\u0440\u0585\u0440", "<U+0440><U+0585><U+0440>"),  # of two alphabets
        ("\u0444\u0430\u0439\u043b \u057d\u0585", "\u0444\u0430\u0439\u043b <U+057D><U+0585>"),
        ("g\u101d\u101dgle", "g<U+101D><U+101D>gle"),
        ("g\u05e1\u05e1gle", "g<U+05E1><U+05E1>gle"),
        ("g\u0ed0\u0ed0gle", "g<U+0ED0><U+0ED0>gle"),  # digits from here on
        ("\u0661\u0662", "<U+0661><U+0662>"),
        ("\u09ea items", "<U+09EA> items"),
        ("\u0966.\u0967", "<U+0966>.<U+0967>"),
        ("g\u1d0f\u1d0fgle", "g<U+1D0F><U+1D0F>gle"),
    ]
    for text, shown in table:
        with row(text, shown):
            assert visible(text) == shown


def test_what_people_write_stays_as_it_is() -> None:
    table: list[Any] = [
        "plain\n\ttext",
        "é è ü ß ø ł",
        "файл.txt и ещё",
        "Ελληνικά",
        "使用API接口",
        "日本語です",
        "हिन्दी",
        "ไทย",
        "عربي",
        "Հայերեն լեզու",
        "עברית",
        "אני כותב",
        "አማርኛ",
        "ქართული",
        "မြန်မာ",
        "ଓଡ଼ିଆ",
        "മലയാളം",
        "ᐃᓄᒃᑎᑐᑦ",
        "한국어",
        "اهلا و سهلا",
        "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ",
        "“quoted” – it’s … ½ ² ™ € 😀",
    ]
    for text in table:
        with row(text):
            assert visible(text) == text


@given(st.lists(st.text(st.one_of(st.sampled_from(SYNTAX.replace("\n", "") + "\u0444\u0440\u0585\u13e2"), st.characters(
    exclude_characters="\n")), max_size=8), max_size=4))  # fmt: skip
def test_a_line_is_shown_the_same_alone_and_among_others(lines: list[str]) -> None:
    assert visible("\n".join(lines)) == "\n".join(map(visible, lines))


def test_every_digit_of_another_script_is_marked() -> None:
    for number in range(0x80, 0x20000):
        if unicodedata.category(chr(number)) == "Nd":
            assert visible(chr(number)) == f"<U+{number:04X}>", hex(number)


def test_every_format_control_private_and_unassigned_character_is_marked() -> None:
    for number in (*range(0x20000), *range(0xE0000, 0xE0200), 0xF0000, 0x10FFFF):
        character = chr(number)
        if unicodedata.category(character)[0] in "CZ" and character not in "\n\t ":
            assert visible(character) == f"<U+{number:04X}>", hex(number)


def test_a_secret_is_found_in_every_form_it_is_written_in_and_nothing_else_is_hidden() -> None:
    secret = 'p\u00e4ss "word/1'
    redaction = Redaction({"API_TOKEN": secret, "NAME": "visible", "PASSWORD": "tiny"})
    encoded = base64.encodebytes(f"user:{secret} and more".encode() * 4).decode()
    in_json = encoded.replace("\n", "\\n")
    for text in (secret, json.dumps(secret), quote(secret), secret.encode().hex().upper(), encoded, in_json):
        hidden = redaction.text(text)
        assert redaction.holds(text) and HIDDEN in hidden and not redaction.holds(hidden), text
    for text in ("visible", "tiny", encoded[:8]):
        assert redaction.text(text) == text and not redaction.holds(text)
    assert redaction.value({secret: [1, f"a {secret} b"]}) == {HIDDEN: [1, f"a {HIDDEN} b"]}
    assert Redaction({}).value(value := [secret]) is value
    size = len(secret)
    for text, whole in (("a? ", 3), (f"a {secret[:4]}", 2), (f"{secret} p", size + 1), (secret + secret[:9], size)):
        assert redaction.find_unfinished(text) == whole, text
    key = Redaction({})
    key.learn_values(["-----BEGIN-----\nfirst line of it\nshort\n-----END-----"])
    assert key.holds("first line of it") and not key.holds("-----BEGIN-----") and not key.holds("short")


def test_names_of_secrets_credentials_in_urls_and_one_line_of_a_text() -> None:
    names = {"API_TOKEN": True, "my_key": True, "MONKEY": False, "GIT_CONFIG_KEY_0": False, "AUTHOR": False}
    for name, is_secret in names.items():
        assert looks_secret(name) is is_secret, name
    for name, is_secret in (("Authorization", True), ("x-api-key", True), ("Accept", False), ("Keep-Alive", False)):
        assert is_secret_header(name) is is_secret, name
    assert hide_credentials("http://me:pw@h/a@b http://h") == "http://***@h/a@b http://h"
    assert hide_credentials("ssh://git@h ssh://me:pw@h", names_too=False) == "ssh://git@h ssh://***@h"
    assert hide_values("abcdefg abcde", ["abcde", "abcdefg", "abcd"]) == "*** ***"
    assert one_line(" a\n b ", 3) == "a b" and one_line("abcd", 3) == "ab\u2026"
