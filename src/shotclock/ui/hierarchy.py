"""The nodes on the screen of a phone, from `uiautomator dump`: how they are found, and their text for models.

Noise around the XML, characters that are illegal in XML, and cut-off or empty dumps are expected.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from xml.parsers import expat

from ..core.errors import Failure
from ..core.value_types import record
from .payload import Matcher

MAX_NODES = 100_000
MAX_DEPTH = 500
MAX_NAME_LENGTH = 200

_ROLES = {
    "Button": "button", "ImageButton": "button", "FloatingActionButton": "button", "Chip": "button",
    "EditText": "textbox", "AutoCompleteTextView": "textbox", "MultiAutoCompleteTextView": "textbox",
    "CheckBox": "checkbox", "RadioButton": "radio", "Switch": "switch", "ToggleButton": "switch",
    "TextView": "text", "CheckedTextView": "text", "ImageView": "img", "Image": "img", "SeekBar": "slider",
    "ProgressBar": "progressbar", "RatingBar": "slider", "Spinner": "combobox", "ListView": "list",
    "RecyclerView": "list", "GridView": "list", "TabWidget": "tablist", "WebView": "document", "Dialog": "dialog",
}  # fmt: skip
_CLICKED = ("button", "textbox", "checkbox", "radio", "switch", "combobox", "slider")
_BOUNDS = re.compile(r"\[(-?\d+),(-?\d+)\]\[(-?\d+),(-?\d+)\]")
# Some versions of Android write a pair of UTF-16 surrogates as two references.
_PAIR = re.compile(r"&#(5[5-6]\d{3});&#(5[6-7]\d{3});")
_REFERENCE = re.compile(r"&#(x[0-9a-fA-F]+|\d+);")
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

NodeKey = tuple[object, ...]


@record
class Node:
    position: int
    depth: int
    parent: Node | None
    text: str
    description: str
    resource_id: str
    package: str
    class_name: str
    box: tuple[int, int, int, int]  # left, top, right, bottom, in pixels
    states: frozenset[str]  # The attributes that are true: enabled, checked, clickable, …
    path: tuple[int, ...]  # the places among their siblings of all nodes above it, and its own
    role: str

    @property
    def is_seen(self) -> bool:
        left, top, right, bottom = self.box
        return right > left and bottom > top and "invisible" not in self.states

    @property
    def is_editable(self) -> bool:
        return self.role == "textbox"

    @property
    def label(self) -> str:
        return self.text or self.description

    @property
    def centre(self) -> tuple[int, int]:
        left, top, right, bottom = self.box
        return (left + right) // 2, (top + bottom) // 2

    @property
    def key(self) -> NodeKey:
        """Return the identity of the node across dumps. Typing into a text field does not change it."""
        text = "" if self.is_editable else self.text
        return self.path, self.class_name, self.resource_id, self.package, text, self.description


class Hierarchy:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    @property
    def screen(self) -> tuple[int, int, int, int]:
        seen = [node.box for node in self.nodes if node.is_seen]
        if not seen:
            raise Failure("ACTION_FAILED", "the phone shows no node that could be touched")
        return min(b[0] for b in seen), min(b[1] for b in seen), max(b[2] for b in seen), max(b[3] for b in seen)

    @property
    def looks(self) -> list[tuple[object, ...]]:
        return [(node.box, node.text, node.description, node.class_name) for node in self.nodes if node.is_seen]

    def find(self, matcher: Matcher, refs: Mapping[str, NodeKey]) -> Iterator[Node]:
        if matcher.css is not None:
            raise Failure("ACTION_UNSUPPORTED", "a phone has no CSS: match by text, id, role or label")
        if matcher.ref is not None and matcher.ref not in refs:
            raise Failure("NODE_NOT_FOUND", f"the last snapshot has no ref {matcher.ref!r:.40}: take another one")
        return (node for node in self.nodes if node.is_seen and self._matches(node, matcher, refs))

    def _matches(self, node: Node, matcher: Matcher, refs: Mapping[str, NodeKey]) -> bool:
        if matcher.ref is not None and node.key != refs[matcher.ref]:
            return False
        if matcher.role is not None and matcher.role.lower() not in (node.role, node.class_name.lower()):
            return False
        text = self.text_of(node) if matcher.role is not None else node.text
        described = node.description
        return (
            (matcher.text_equals is None or text == matcher.text_equals)
            and (matcher.text_contains is None or matcher.text_contains.lower() in text.lower())
            and (matcher.resource_id is None or matcher.resource_id in (node.resource_id, _short(node.resource_id)))
            and (matcher.content_desc_equals is None or described == matcher.content_desc_equals)
            and (matcher.content_desc_contains is None or matcher.content_desc_contains.lower() in described.lower())
        )

    def text_of(self, node: Node) -> str:
        """Return the text of a node, its description, or the texts inside it."""
        if node.label:
            return node.label
        inside = itertools.takewhile(lambda each: each.depth > node.depth, self.nodes[node.position + 1 :])
        return " ".join(each.label for each in inside if each.is_seen and each.label)

    def find_value(self, label: Node) -> tuple[str, str] | None:
        """Return a label and its value: the text after its colon, or the next text below its parent or grandparent."""
        key, _, rest = self.text_of(label).partition(":")
        if rest.strip():
            return key.strip(), rest.strip()
        for above in (label.parent, None if label.parent is None else label.parent.parent):
            for node in self.nodes[label.position + 1 :]:
                if above is None or node.depth <= above.depth:
                    break
                if node.is_seen and node.label:
                    return key.strip(), node.label
        return None

    def write_snapshot(self, refs: dict[str, NodeKey], next_ref: Iterator[int]) -> str:
        """Return a line per node with a role, a name or a text. A node keeps its ref from the last snapshot."""
        earlier = {key: ref for ref, key in refs.items()}
        refs.clear()
        lines: list[str] = []
        shown: list[int] = []
        for node in self.nodes:
            while shown and shown[-1] >= node.depth:
                shown.pop()
            if not node.is_seen or (node.role == "generic" and not node.label):
                continue
            value = f": {_quote(node.text)}" if node.is_editable and node.text else ""
            ref = earlier.get(node.key) or f"e{next(next_ref)}"
            refs[ref] = node.key
            lines.append(f"{'  ' * len(shown)}- {_describe(node)} [ref={ref}]{value}")
            shown.append(node.depth)
        return "\n".join(lines)


def _describe(node: Node) -> str:
    name = node.description if node.is_editable else node.label
    words = [node.role, *([_quote(name)] if name else [])]
    if node.resource_id:
        words.append(f"[id={_short(node.resource_id)}]")
    shown = ("checked", "selected", "focused", "scrollable", "password")
    words += [f"[{state}]" for state in shown if state in node.states]
    if "clickable" in node.states and node.role not in _CLICKED:
        words.append("[clickable]")
    if "enabled" not in node.states:
        words.append("[disabled]")
    return " ".join(words)


def _quote(text: str) -> str:
    short = text if len(text) <= MAX_NAME_LENGTH else text[: MAX_NAME_LENGTH - 1] + "…"
    return json.dumps(short, ensure_ascii=False)


def _short(resource_id: str) -> str:
    return resource_id.rpartition("/")[2]


def parse_dump(dump: bytes) -> Hierarchy:
    text = dump.decode("utf-8", "replace")
    start, end = text.find("<hierarchy"), text.rfind("</hierarchy>")
    if start < 0 or end < start:
        raise ValueError(_explain(text))
    nodes: list[Node] = []
    above: list[tuple[Node | None, Iterator[int]]] = [(None, itertools.count())]
    """The open elements: for each its node or the nearest one above it, and the places of its children."""

    def open_element(name: str, attributes: dict[str, str]) -> None:
        parent, places = above[-1]
        place, node = next(places), parent
        if name == "node" or "class" in attributes:
            if len(nodes) >= MAX_NODES or len(above) > MAX_DEPTH + 1:
                raise ValueError(f"the dump has more than {MAX_NODES} nodes, or more than {MAX_DEPTH} in each other")
            node = _read_node(attributes, parent, place, len(nodes))
            nodes.append(node)
        above.append((node, itertools.count()))

    def refuse(*_: object) -> None:
        raise ValueError("the dump declares a document type")

    parser = expat.ParserCreate()
    parser.StartElementHandler = open_element
    parser.EndElementHandler = lambda name: above.pop()
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(_clean(text[start : end + len("</hierarchy>")]), True)
    except expat.ExpatError as error:
        raise ValueError(f"the dump is not XML: {error}") from None
    if not nodes:
        raise ValueError("the dump has no nodes")
    return Hierarchy(nodes)


def _explain(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "its answer was empty"
    line = next((line for line in lines if "ERROR" in line or "rror:" in line), lines[-1])
    hints = {"null root": " (is the screen off?)", "idle": " (something moves all the time)"}
    return f"it answered {line[:200]!r}" + next((hint for sign, hint in hints.items() if sign in line), "")


def _clean(xml: str) -> str:
    xml = _PAIR.sub(lambda pair: chr(0x10000 + ((int(pair[1]) - 0xD800) << 10) + int(pair[2]) - 0xDC00), xml)

    def check(reference: re.Match[str]) -> str:
        number = int(reference[1][1:], 16) if reference[1][0] == "x" else int(reference[1])
        return reference[0] if number <= 0x10FFFF and not _ILLEGAL.match(chr(number)) else "\ufffd"

    return _ILLEGAL.sub("\ufffd", _REFERENCE.sub(check, xml))


_STATES = ("checkable", "checked", "clickable", "enabled", "focused", "scrollable", "password", "selected")


def _read_node(attributes: dict[str, str], parent: Node | None, place: int, position: int) -> Node:
    bounds = _BOUNDS.search(attributes.get("bounds", ""))
    states = {state for state in _STATES if attributes.get(state) == "true"}
    if "enabled" not in attributes:
        states.add("enabled")
    if attributes.get("visible-to-user") == "false":
        states.add("invisible")
    class_name = attributes.get("class", "")
    role = _ROLES.get(class_name.rpartition(".")[2].removeprefix("AppCompat").removeprefix("Material"), "generic")
    if role == "generic" and "checkable" in states:
        role = "checkbox"
    elif role == "generic" and "clickable" in states:
        role = "button"
    return Node(
        position=position,
        depth=0 if parent is None else parent.depth + 1,
        parent=parent,
        text=attributes.get("text", ""),
        description=attributes.get("content-desc", ""),
        resource_id=attributes.get("resource-id", ""),
        package=attributes.get("package", ""),
        class_name=class_name,
        box=(int(bounds[1]), int(bounds[2]), int(bounds[3]), int(bounds[4])) if bounds else (0, 0, 0, 0),
        states=frozenset(states),
        path=(place,) if parent is None else (*parent.path, place),
        role=role,
    )
