"""Nodes in frames, and actions on inputs, in a real browser."""

import os
from pathlib import Path
from typing import Any

import pytest

from .conftest import act, data_of
from .pages import Session

pytestmark = pytest.mark.slow

SNAP = {"id": "snap", "type": "snapshot_ui"}


def do(action_type: str, matcher: dict[str, str], **params: Any) -> dict[str, Any]:
    return {"id": action_type, "type": action_type, "params": {"matcher": matcher, **params}}


def ref_of(text: str, node: str) -> str:
    line = next(line for line in text.splitlines() if node in line)
    return line.partition("[ref=")[2].partition("]")[0]


def test_matchers_find_nodes_in_frames_nested_ones_and_those_of_other_sites(session: Session) -> None:
    for matcher, after in (
        ({"textEquals": "Outer"}, "Pressed"),
        ({"role": "button", "textEquals": "Inner"}, "Deep"),
        ({"css": "button:first-of-type", "textEquals": "Foreign"}, "Done"),
    ):
        told = session.run(session.open("/frames"), do("click", matcher), act("wait_for_node", "w", after))
        assert told["ok"], told
    typing = do("enter_text", {"contentDescEquals": "Deep name"}, text="Ada")
    told = session.run(typing, do("read_text", {"contentDescEquals": "Deep name"}))
    assert data_of(told, "read_text")["text"] == "Ada", told
    told = session.run(do("read_text", {"role": "button", "textEquals": "Main"}, all=True))
    assert data_of(told, "read_text")["all"] == ["Main", "Main"]  # that of the page, then that of the frame
    told = session.run(act("wait_for_node", "w", "Done", state="hidden", timeoutMs=400))
    assert told["error"]["code"] == "WAIT_TIMEOUT", told


def test_a_ref_names_a_node_in_its_frame(session: Session) -> None:
    told = session.run(session.open("/frames"), act("wait_for_node", "w", "Inner"), SNAP)
    text = data_of(told, "snap")["text"]
    for node, after in (('button "Inner"', "Deep"), ('button "Foreign"', "Done")):
        told = session.run(do("click", {"ref": ref_of(text, node)}), act("wait_for_node", "w", after))
        assert told["ok"], told
    told = session.run(do("read_text", {"ref": ref_of(text, 'button "Outer"'), "role": "button"}))
    assert data_of(told, "read_text")["text"] == "Outer", told


def test_a_frame_that_hangs_or_goes_away_keeps_no_action_from_the_others(session: Session) -> None:
    assert session.run(session.open("/frames"))["ok"]
    told = session.run(do("click", {"textEquals": "Hang"}, timeoutMs=700))
    assert told["error"]["code"] == "OPERATION_TIMEOUT" and told["data"]["page"]["state"] == "same", told
    told = session.run(do("click", {"textEquals": "Inner"}), act("wait_for_node", "w", "Deep"), SNAP)
    assert told["ok"], told
    assert data_of(told, "snap")["silentFrames"] == [
        {"where": session.url.replace("127.0.0.1", "localhost") + "/foreign"}
    ]
    assert 'button "Deep"' in data_of(told, "snap")["text"] and told["elapsed_ms"] < 10_000
    assert session.run(session.open("/frames"), act("wait_for_node", "w", "Inner"))["ok"]
    text = data_of(session.run(SNAP), "snap")["text"]
    told = session.run(session.open("/"), do("click", {"ref": ref_of(text, 'button "Inner"')}))
    assert told["error"]["code"] == "NODE_NOT_FOUND", told


def test_options_are_selected_by_label_or_value_and_a_menu_is_opened_by_the_mouse(session: Session) -> None:
    colours = do("select_option", {"contentDescEquals": "Colour"}, options=["Red", "b"])
    told = session.run(session.open("/inputs"), colours)
    assert data_of(told, "select_option")["selected"] == ["r", "b"], told
    told = session.run(do("select_option", {"css": "#size"}, options=["L"]), do("read_text", {"css": "#size"}))
    assert data_of(told, "read_text")["text"] == "L"
    told = session.run(do("select_option", {"css": "#size"}, options=["XL"], timeoutMs=400))
    assert told["error"]["code"] == "WAIT_TIMEOUT" and told["meta"]["side_effects"] == "none", told
    told = session.run(do("hover", {"textEquals": "Menu"}), act("wait_for_node", "w", "Open me"))
    assert told["ok"], told


def test_files_are_uploaded_to_an_input_or_through_the_button_that_asks_for_them(
    session: Session, tmp_path: Path
) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("1")
    two.write_text("2")
    for matcher, paths in (({"css": "#file"}, [one]), ({"textEquals": "Choose"}, [one, two])):
        upload = do("upload_file", matcher, paths=list(map(os.fspath, paths)))
        told = session.run(session.open("/inputs"), upload, do("read_text", {"css": "#got"}))
        assert data_of(told, "upload_file") == {"files": [path.name for path in paths]}, told
        assert data_of(told, "read_text")["text"] == ",".join(path.name for path in paths)
    for paths in ["one.txt"], [str(tmp_path / "none")], [str(tmp_path)]:
        told = session.run(do("upload_file", {"css": "#file"}, paths=paths))
        assert told["error"]["code"] == "ACTION_UNSUPPORTED" and told["meta"]["side_effects"] == "none", told


def test_a_page_of_fifty_thousand_nodes_comes_back_cut_and_scrolling_and_matchers_show_the_rest(
    session: Session,
) -> None:
    told = session.run(session.open("/rows"), SNAP, timeout_ms=60000)
    data = data_of(told, "snap")
    assert data["truncated"] and data["nodesLeftOut"] > 45_000 and "scroll" in data["rest"], told
    assert 'button "b 3"' in data["text"] and len(data["text"]) <= 24_000
    told = session.run(do("click", {"ref": ref_of(data["text"], 'button "b 3"')}))
    assert told["ok"], told
    told = session.run(do("hover", {"css": "tr:nth-child(9000)"}), SNAP, timeout_ms=60000)  # scrolls it into view
    text = data_of(told, "snap")["text"]
    assert 'button "b 8999"' in text and 'button "b 3"' not in text and "Rows" not in text
    told = session.run({**SNAP, "params": {"matcher": {"css": "tr:nth-child(9000)"}}}, timeout_ms=60000)
    data = data_of(told, "snap")
    assert 'button "b 8999"' in data["text"] and not data["truncated"] and "b 12" not in data["text"], data


def test_a_deep_page_with_a_long_text_comes_back_cut(session: Session) -> None:
    data = data_of(session.run(session.open("/deep"), SNAP), "snap")
    assert data["truncated"] and data["deepest"] == 50 and len(data["text"].encode()) <= 24_000
    data = data_of(session.run({**SNAP, "params": {"matcher": {"css": "p"}}}), "snap")
    assert "long long" in data["text"] and data["linesCut"] == 1 and len(data["text"].encode()) <= 24_000
