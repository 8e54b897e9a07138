"""What is read from a dump: nodes, whatever stands around them, and their text for models."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.errors import Failure
from shotclock.ui._adb import Phone, choose_phone, parse_phones
from shotclock.ui._android import MAX_DEPTH, Hierarchy, NodeKey, parse_dump
from shotclock.ui.payload import Matcher

from .scripted_phone import SHOP, node, window


def snapshot(xml: str, refs: dict[str, NodeKey] | None = None, start: int = 1) -> list[str]:
    return parse_dump(xml.encode()).write_snapshot({} if refs is None else refs, itertools.count(start)).splitlines()


def find(hierarchy: Hierarchy, **criteria: str) -> list[str]:
    return [each.text for each in hierarchy.find(Matcher.model_validate(criteria), {})]


# --- reading ------------------------------------------------------------------------------------------------


def test_what_stands_around_a_dump_does_not_matter() -> None:
    for around in (
        "{}",
        "{}UI hierchary dumped to: /dev/tty\n",
        "WARNING: linker: something\r\nKilled\n{}\n",
        "\x00\x01\ufffd<node/> {} </node> trailing",
    ):
        assert find(parse_dump(around.replace("{}", SHOP).encode()), role="button") == ["Buy", "Closed"]


def test_what_is_no_dump_is_told_in_the_phones_words() -> None:
    for dump, said in (
        (b"", "empty"),
        (b"ERROR: null root node returned by UiTestAutomationBridge.\ncat: no such file", "null root node.*screen off"),
        (b"ERROR: could not get idle state.", "idle state.*moves all the time"),
        (b"Killed", "Killed"),
        (SHOP.encode()[:300], "it answered"),
        (b"<hierarchy rotation='0'></hierarchy>", "no nodes"),
        (b"<hierarchy><node text='a</hierarchy>", "not XML"),
        (b"<hierarchy><node></hierarchy>", "not XML"),
        (b"</hierarchy><hierarchy>", "it answered"),
        (("<hierarchy>" + "<node>" * 600 + "</node>" * 600 + "</hierarchy>").encode(), f"more than {MAX_DEPTH}"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_dump(dump)


def test_a_document_type_is_not_read() -> None:
    bomb = b"<hierarchy><!DOCTYPE x [<!ENTITY a 'aaaa'>]><node text='&a;'/></hierarchy>"
    with pytest.raises(ValueError):
        parse_dump(bomb)


def test_characters_that_no_xml_has_are_replaced() -> None:
    for written, read in (
        ("&#128512;", "😀"),
        ("&#55357;&#56832;", "😀"),
        ("&#55357;", "\ufffd"),
        ("&#0;a&#x1F;", "\ufffda\ufffd"),
        ("&#99999999999;", "\ufffd"),
        ("a\x08b", "a\ufffdb"),
        ("&lt;&amp;&#10;", "<&\n"),
    ):
        dump = f'<hierarchy><node class="android.widget.TextView" text="{written}" bounds="[0,0][1,1]"/></hierarchy>'
        assert parse_dump(dump.encode()).nodes[0].text == read


@given(st.binary(max_size=200), st.integers(0, len(SHOP)), st.integers(0, 300))
def test_no_dump_raises_anything_but_that_it_is_none(noise: bytes, at: int, cut: int) -> None:
    dump = SHOP.encode()
    try:
        hierarchy = parse_dump(dump[:at] + noise + dump[at + cut :])
    except ValueError:
        return
    hierarchy.write_snapshot({}, itertools.count(1))


# --- finding ------------------------------------------------------------------------------------------------


def test_all_that_a_matcher_says_must_hold() -> None:
    shop = parse_dump(SHOP.encode())
    assert find(shop, textEquals="Buy", role="button") == ["Buy"]
    assert find(shop, textEquals="Buy", role="checkbox") == []
    assert find(shop, textContains="PRI") == ["Price"]
    assert find(shop, resourceId="name") == find(shop, contentDescEquals="Name") == ["old"]
    assert find(shop, role="android.widget.CheckBox") == ["Gift"]


def test_what_is_not_to_be_seen_is_not_found() -> None:
    hidden = window(node("TextView", "a", box="[5,5][5,9]"), node("TextView", "b", visible_to_user="false"))
    assert find(parse_dump(hidden.encode()), role="text") == []


def test_a_button_is_named_by_the_texts_inside_it() -> None:
    composed = window(
        node("android.view.View", "", node("TextView", "Add"), node("TextView", "to basket"), clickable="true")
    )
    hierarchy = parse_dump(composed.encode())
    [button] = hierarchy.find(Matcher.model_validate({"role": "button", "textEquals": "Add to basket"}), {})
    assert hierarchy.text_of(button) == "Add to basket"


def test_the_value_of_a_label_stands_beside_it() -> None:
    for xml, pair in (
        (window(node("TextView", "Total: 5 EUR")), ("Total", "5 EUR")),
        (window(node("LinearLayout", "", node("TextView", "Total:"), node("TextView", "5"))), ("Total", "5")),
        (
            window(
                node(
                    "TableRow",
                    "",
                    node("LinearLayout", "", node("TextView", "Total")),
                    node("LinearLayout", "", node("TextView", "5")),
                )
            ),
            ("Total", "5"),
        ),
        (window(node("LinearLayout", "", node("TextView", "Total")), node("TextView", "else")), None),
    ):
        hierarchy = parse_dump(xml.encode())
        [label] = hierarchy.find(Matcher.model_validate({"textContains": "Total"}), {})
        assert hierarchy.find_value(label) == pair


# --- snapshots ------------------------------------------------------------------------------------------------


def test_a_snapshot_is_nested_as_the_nodes_that_it_shows() -> None:
    row = node("LinearLayout", "", node("FrameLayout", "", node("TextView", 'a "b"\nc')), clickable="true")
    xml = window(node("androidx.recyclerview.widget.RecyclerView", "", row, scrollable="true"))
    assert snapshot(xml) == [
        "- list [scrollable] [ref=e1]",
        "  - button [ref=e2]",
        '    - text "a \\"b\\"\\nc" [ref=e3]',
    ]


def test_a_node_keeps_its_ref_for_as_long_as_it_is_the_same() -> None:
    refs: dict[str, NodeKey] = {}
    snapshot(SHOP, refs)
    typed = snapshot(SHOP.replace('"old"', '"new"').replace('"5 EUR"', '"6 EUR"'), refs, start=100)
    assert '- textbox "Name" [id=name] [ref=e4]: "new"' in typed, "what was typed makes no other field of it"
    assert '- text "6 EUR" [ref=e100]' in typed, "another text is another node"
    with pytest.raises(Failure, match="no ref 'e6'"):
        parse_dump(SHOP.encode()).find(Matcher.model_validate({"ref": "e6"}), refs)


# --- phones ---------------------------------------------------------------------------------------------------

DEVICES = """* daemon not running; starting now at tcp:5037
* daemon started successfully
List of devices attached
emulator-5554          device product:sdk model:Pixel_7 device:emu transport_id:1
R58M12                 unauthorized usb:1-2 transport_id:2
192.168.1.5:5555       offline
XYZ                    no permissions (user in plugdev group; are your udev rules wrong?); see [http://x] usb:1-3

garbage
"""


def test_phones_are_read_with_their_state_and_what_to_do() -> None:
    phones = parse_phones(DEVICES)
    assert [(phone.serial, phone.state) for phone in phones] == [
        ("emulator-5554", "device"),
        ("R58M12", "unauthorized"),
        ("192.168.1.5:5555", "offline"),
        ("XYZ", "no permissions"),
    ]
    assert phones[0].describe() == "Pixel 7"
    assert "allow USB debugging" in phones[1].describe() and "udev" in phones[3].describe()
    assert choose_phone(phones) == "emulator-5554"


def test_without_one_phone_to_use_it_is_said_what_to_do() -> None:
    for states, said in (
        ([], "no phone is attached"),
        (["offline", "unauthorized"], "s0 is offline.*s1 is unauthorized"),
        (["device", "device"], "2 phones.*android:s0, android:s1"),
    ):
        with pytest.raises(Failure, match=said) as raised:
            choose_phone([Phone(f"s{number}", state, "") for number, state in enumerate(states)])
        assert raised.value.code == "DEVICE_UNAVAILABLE"
