"""What a phone shows, read from what `uiautomator dump` writes: nodes, how they are found, and their text for models.

The dump comes from a phone, and so do the texts in it: what stands around the XML, characters that no XML may have, a
dump that was cut off or has no root are expected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from xml.parsers import expat

from ..core.errors import Failure
from ..core.value_types import record
from .payload import Matcher

MAX_NODES = 100_000
MAX_DEPTH = 500
# Of a name that goes into a snapshot.
MAX_NAME_LENGTH = 200

_ROLES = {
    "Button": "button", "ImageButton": "button", "FloatingActionButton": "button", "Chip": "button",
    "EditText": "textbox", "AutoCompleteTextView": "textbox", "MultiAutoCompleteTextView": "textbox",
    "CheckBox": "checkbox", "RadioButton": "radio", "Switch": "switch", "ToggleButton": "switch",
    "TextView": "text", "CheckedTextView": "text", "ImageView": "img", "Image": "img", "SeekBar": "slider",
    "ProgressBar": "progressbar", "RatingBar": "slider", "Spinner": "combobox", "ListView": "list",
    "RecyclerView": "list", "GridView": "list", "TabWidget": "tablist", "WebView": "document", "Dialog": "dialog",
}  # fmt: skip
# Those that say by their role that they can be clicked.
_CLICKED = ("button", "textbox", "checkbox", "radio", "switch", "combobox", "slider")
_BOUNDS = re.compile(r"\[(-?\d+),(-?\d+)\]\[(-?\d+),(-?\d+)\]")
# Half a pair of UTF-16, which some versions of Android write as two references.
_PAIR = re.compile(r"&#(5[5-6]\d{3});&#(5[6-7]\d{3});")
_REFERENCE = re.compile(r"&#(x[0-9a-fA-F]+|\d+);")
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

NodeKey = tuple[object, ...]


@record
class Node:
    """One node that a phone shows."""

    position: int
    """In the order of the dump."""
    depth: int
    parent: Node | None
    text: str
    description: str
    resource_id: str
    package: str
    class_name: str
    box: tuple[int, int, int, int]
    """Left, top, right, bottom, in pixels."""
    states: frozenset[str]
    """The attributes that are true: enabled, checked, clickable, …"""
    path: tuple[int, ...]
    """Of each node above it the place among its siblings."""
    role: str

    @property
    def is_seen(self) -> bool:
        left, top, right, bottom = self.box
        return right > left and bottom > top and "invisible" not in self.states

    @property
    def is_editable(self) -> bool:
        return self.role == "textbox"

    @property
    def centre(self) -> tuple[int, int]:
        left, top, right, bottom = self.box
        return (left + right) // 2, (top + bottom) // 2

    @property
    def key(self) -> NodeKey:
        """Return what makes it the same node in the next dump: its place and what stands there. What a person types
        does not make another one of it."""
        text = "" if self.is_editable else self.text
        return self.path, self.class_name, self.resource_id, self.package, text, self.description


class Hierarchy:
    """All nodes of one dump, in their order."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    @property
    def screen(self) -> tuple[int, int, int, int]:
        """Return the box around all of it. Raises Failure ACTION_FAILED where nothing is to be seen."""
        seen = [node.box for node in self.nodes if node.is_seen]
        if not seen:
            raise Failure("ACTION_FAILED", "the phone shows nothing that could be touched")
        return min(b[0] for b in seen), min(b[1] for b in seen), max(b[2] for b in seen), max(b[3] for b in seen)

    @property
    def looks(self) -> list[tuple[object, ...]]:
        """Return all that is to be seen, to be compared with another dump."""
        return [(node.box, node.text, node.description, node.class_name) for node in self.nodes if node.is_seen]

    def find(self, matcher: Matcher, refs: Mapping[str, NodeKey]) -> Iterator[Node]:
        """Yield the nodes that are to be seen and match. Raises Failure ACTION_UNSUPPORTED, and NODE_NOT_FOUND for a
        ref that is none of the last snapshot."""
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
        """Return what a node says: its text, its description, or the texts inside it."""
        own = node.text or node.description
        if own:
            return own
        inside = (each.text or each.description for each in self._inside(node) if each.is_seen)
        return " ".join(filter(None, inside))

    def _inside(self, node: Node) -> Iterator[Node]:
        for position in range(node.position + 1, len(self.nodes)):
            if self.nodes[position].depth <= node.depth:
                return
            yield self.nodes[position]

    def find_value(self, label: Node) -> tuple[str, str] | None:
        """Return a label without its colon, and the text that belongs to it: what follows the colon, else the next text
        below the same parent, or below the parent of that."""
        key, _, rest = self.text_of(label).partition(":")
        if rest.strip():
            return key.strip(), rest.strip()
        behind = self.nodes[label.position + 1 :]
        for above in (label.parent, None if label.parent is None else label.parent.parent):
            for node in behind:
                if above is None or node.depth <= above.depth:
                    break
                if node.is_seen and (node.text or node.description):
                    return key.strip(), node.text or node.description
        return None

    def write_snapshot(self, refs: dict[str, NodeKey], next_ref: Iterator[int]) -> str:
        """Return a line per node that has a role, a name or a text, and set `refs` to theirs. A node that had one in
        the last snapshot keeps it."""
        known = {key: ref for ref, key in refs.items()}
        refs.clear()
        lines: list[str] = []
        shown: list[int] = []
        """The depths of the nodes around the current one that have a line."""
        for node in self.nodes:
            while shown and shown[-1] >= node.depth:
                shown.pop()
            if not node.is_seen or (node.role == "generic" and not (node.text or node.description)):
                continue
            ref = known.get(node.key) or f"e{next(next_ref)}"
            refs[ref] = node.key
            lines.append(f"{'  ' * len(shown)}- {_describe(node)} [ref={ref}]{_value(node)}")
            shown.append(node.depth)
        return "\n".join(lines)


def _describe(node: Node) -> str:
    name = node.description if node.is_editable else node.text or node.description
    words = [node.role]
    if name:
        words.append(_quote(name))
    if node.resource_id:
        words.append(f"[id={_short(node.resource_id)}]")
    words += [
        f"[{state}]" for state in ("checked", "selected", "focused", "scrollable", "password") if state in node.states
    ]
    if "clickable" in node.states and node.role not in _CLICKED:
        words.append("[clickable]")
    if "enabled" not in node.states:
        words.append("[disabled]")
    return " ".join(words)


def _value(node: Node) -> str:
    return f": {_quote(node.text)}" if node.is_editable and node.text else ""


def _quote(text: str) -> str:
    short = text if len(text) <= MAX_NAME_LENGTH else text[: MAX_NAME_LENGTH - 1] + "…"
    return json.dumps(short, ensure_ascii=False)


def _short(resource_id: str) -> str:
    return resource_id.rpartition("/")[2]


# --- reading ------------------------------------------------------------------------------------------------


def parse_dump(dump: bytes) -> Hierarchy:
    """Return what a dump shows, whatever stands around it. Raises ValueError, with what the phone said instead."""
    text = dump.decode("utf-8", "replace")
    start, end = text.find("<hierarchy"), text.rfind("</hierarchy>")
    if start < 0 or end < start:
        raise ValueError(_explain(text))
    reader = _Reader()
    try:
        reader.read(_clean(text[start : end + len("</hierarchy>")]))
    except expat.ExpatError as error:
        raise ValueError(f"the dump is no XML: {error}") from None
    if not reader.nodes:
        raise ValueError("the dump has no nodes")
    return Hierarchy(reader.nodes)


def _explain(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "it said nothing"
    told = next((line for line in lines if "ERROR" in line or "rror:" in line), lines[-1])
    hint = (
        " (is the screen off?)" if "null root" in told else " (something moves all the time)" if "idle" in told else ""
    )
    return f"it said {told[:200]!r}{hint}"


def _clean(xml: str) -> str:
    """Make XML of what is nearly so: references to characters that no XML may have are replaced."""
    xml = _PAIR.sub(lambda pair: chr(0x10000 + ((int(pair[1]) - 0xD800) << 10) + int(pair[2]) - 0xDC00), xml)

    def check(reference: re.Match[str]) -> str:
        number = int(reference[1][1:], 16) if reference[1][0] == "x" else int(reference[1])
        is_legal = number <= 0x10FFFF and not _ILLEGAL.match(chr(number))
        return reference[0] if is_legal else "\ufffd"

    return _ILLEGAL.sub("\ufffd", _REFERENCE.sub(check, xml))


class _Reader:
    """Makes nodes of the elements as they are read."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._above: list[Node | None] = []
        self._counts: list[int] = []
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.StartDoctypeDeclHandler = self._refuse

    def read(self, xml: str) -> None:
        self._parser.Parse(xml, True)

    def _refuse(self, *_: object) -> None:
        raise ValueError("the dump declares a document type, which no dump does")

    def _start(self, name: str, told: dict[str, str]) -> None:
        place = self._counts[-1] if self._counts else 0
        if self._counts:
            self._counts[-1] += 1
        self._counts.append(0)
        parent = self._above[-1] if self._above else None
        if name != "node" and "class" not in told:
            self._above.append(parent)
            return
        if len(self.nodes) >= MAX_NODES:
            raise ValueError(f"the dump has more than {MAX_NODES} nodes")
        if len(self._above) > MAX_DEPTH:
            raise ValueError(f"the dump has nodes below more than {MAX_DEPTH} others")
        self._above.append(node := _read_node(told, parent, place, len(self.nodes)))
        self.nodes.append(node)

    def _end(self, name: str) -> None:
        self._above.pop()
        self._counts.pop()


_STATES = ("checkable", "checked", "clickable", "enabled", "focused", "scrollable", "password", "selected")


def _read_node(told: dict[str, str], parent: Node | None, place: int, position: int) -> Node:
    bounds = _BOUNDS.search(told.get("bounds", ""))
    states = {state for state in _STATES if told.get(state) == "true"}
    if "enabled" not in told:
        states.add("enabled")
    if told.get("visible-to-user") == "false":
        states.add("invisible")
    class_name = told.get("class", "")
    role = _ROLES.get(class_name.rpartition(".")[2].removeprefix("AppCompat").removeprefix("Material"), "generic")
    if role == "generic" and "checkable" in states:
        role = "checkbox"
    elif role == "generic" and "clickable" in states:
        role = "button"
    return Node(
        position=position,
        depth=0 if parent is None else parent.depth + 1,
        parent=parent,
        text=told.get("text", ""),
        description=told.get("content-desc", ""),
        resource_id=told.get("resource-id", ""),
        package=told.get("package", ""),
        class_name=class_name,
        box=(int(bounds[1]), int(bounds[2]), int(bounds[3]), int(bounds[4])) if bounds else (0, 0, 0, 0),
        states=frozenset(states),
        path=(place,) if parent is None else (*parent.path, place),
        role=role,
    )
