"""Content that a command returns, alone or in a list: images, audio, files, links and embedded resources.

The constructors are those of FastMCP. Files are read and everything is checked when the object is made, so that a
mistake is reported at its line.
"""

from __future__ import annotations

import base64
import contextlib
import mimetypes
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote

from ..core.content_blocks import LONGEST_CONTENT, Block, Content, blocks_of, describe_size, is_base64, text_block
from ..core.errors import Failure
from ..core.value_types import JsonObject

# The audience, the priority and the date of content: a mapping, or the model of the SDK.
Annotations = Any

_FORMAT = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_IMAGE_FORMATS = {"jpg": "jpeg", "svg": "svg+xml", "tif": "tiff"}
_AUDIO_FORMATS = {"mp3": "mpeg", "m4a": "mp4"}
_TEXT_FORMATS = {
    **{"plain": "plain", "txt": "plain", "text": "plain", "csv": "csv", "html": "html", "htm": "html"},
    **{"md": "markdown", "markdown": "markdown"},
}
# The first bytes of the formats that are recognised without a name; RIFF files name theirs at the ninth byte.
# Patterns, in which a dot is any byte.
_FIRST_BYTES = {
    **{b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"},
    **{b"RIFF....WEBP": "image/webp", b"RIFF....WAVE": "audio/wav", b"OggS": "audio/ogg", b"fLaC": "audio/flac"},
    **{b"ID3": "audio/mpeg", b"\xff\xfb": "audio/mpeg"},
}


class Media(Content):
    """An image or a sound."""

    __slots__ = ()
    kind: ClassVar[Literal["image", "audio"]]
    formats: ClassVar[dict[str, str]]

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        data: bytes | str | None = None,
        format: str | None = None,
        annotations: Annotations | None = None,
    ) -> None:
        super().__init__(_media(self.kind, self.formats, path, data, format, annotations))


class Image(Media):
    """An image: `Image(path="plot.png")`, or `Image(data=png, format="png")` with bytes or base64."""

    __slots__ = ()
    kind: ClassVar[Literal["image", "audio"]] = "image"
    formats: ClassVar[dict[str, str]] = _IMAGE_FORMATS


class Audio(Media):
    """A sound: `Audio(path="answer.wav")`, or `Audio(data=wav, format="wav")` with bytes or base64."""

    __slots__ = ()
    kind: ClassVar[Literal["image", "audio"]] = "audio"
    formats: ClassVar[dict[str, str]] = _AUDIO_FORMATS


class EmbeddedResource(Content):
    """The text or the bytes of a resource, under its URI."""

    __slots__ = ()

    def __init__(
        self,
        uri: str,
        text: str | None = None,
        data: bytes | str | None = None,
        mime_type: str | None = None,
        annotations: Annotations | None = None,
    ) -> None:
        _check_uri(uri)
        if (text is None) == (data is None):
            raise ValueError("an embedded resource has either text or data")
        inside: Block = {"uri": uri, **({} if mime_type is None else {"mimeType": mime_type})}
        inside |= {"text": text} if data is None else {"blob": _encode(data, uri)}
        super().__init__({"type": "resource", "resource": inside, "annotations": _check_annotations(annotations)})


class File(Content):
    """A file, embedded with its URI: a text if its type is one, else its bytes."""

    __slots__ = ()

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        data: bytes | None = None,
        format: str | None = None,
        name: str | None = None,
        annotations: Annotations | None = None,
    ) -> None:
        content, found = _read(path, data)
        format = None if format is None else _check_format(format)
        if format is not None:
            text = _TEXT_FORMATS.get(format)
            mime_type = f"application/{format}" if text is None else f"text/{text}"
        else:
            known_as = found.name if found is not None else name or ""
            mime_type = mimetypes.guess_type(known_as)[0] or "application/octet-stream"
        if found is not None:
            uri = found.resolve().as_uri()
        else:
            suffix = "" if name and Path(name).suffix else f".{format or mime_type.partition('/')[2]}"
            uri = f"file:///{quote((name or 'resource') + suffix)}"
        inside: Block = {"uri": uri, "mimeType": mime_type}
        text = None
        if mime_type.startswith("text/"):
            with contextlib.suppress(UnicodeDecodeError):
                text = content.decode()
        inside |= {"blob": _encode(content, uri)} if text is None else {"text": text}
        super().__init__({"type": "resource", "resource": inside, "annotations": _check_annotations(annotations)})


class ResourceLink(Content):
    """The URI of a resource that the client may read."""

    __slots__ = ()

    def __init__(
        self,
        uri: str,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        mime_type: str | None = None,
        size: int | None = None,
        annotations: Annotations | None = None,
    ) -> None:
        _check_uri(uri)
        super().__init__(
            {
                "type": "resource_link",
                "uri": uri,
                "name": name or uri.rstrip("/").rpartition("/")[2] or uri,
                "title": title,
                "description": description,
                "mimeType": mime_type,
                "size": size,
                "annotations": _check_annotations(annotations),
            }
        )


class Message(Content):
    """A message of a prompt: a text, content, or any value as its JSON."""

    __slots__ = ()

    def __init__(self, content: object, role: Literal["user", "assistant"] = "user") -> None:
        if role not in ("user", "assistant"):
            raise ValueError(f"the role of a message is 'user' or 'assistant', not {role!r}")
        from ..core.arguments import to_jsonable

        plain = to_jsonable(content)
        found = None if isinstance(plain, list) else blocks_of(plain)
        super().__init__({"role": role, "content": found[0] if found else text_block(plain)})

    def __repr__(self) -> str:
        return f"<Message of the {self.block['role']}>"


def _media(
    kind: Literal["image", "audio"],
    formats: Mapping[str, str],
    path: str | os.PathLike[str] | None,
    data: bytes | str | None,
    format: str | None,
    annotations: Annotations | None,
) -> Block:
    content, found = _read(path, data)
    if format is not None:
        format = _check_format(format)
        mime_type = f"{kind}/{formats.get(format, format)}"
    else:
        recognised = (each for first, each in _FIRST_BYTES.items() if re.match(first, content, re.DOTALL))
        by_name = "" if found is None else mimetypes.guess_type(found.name)[0] or ""
        mime_type = next(recognised, by_name)
        if not mime_type.startswith(f"{kind}/"):
            what = "these bytes are" if found is None else f"{found} is"
            raise ValueError(f"{what} no known kind of {kind}: give its format, as in format='png'")
    data = _encode(content, "the data" if found is None else str(found))
    return {"type": kind, "data": data, "mimeType": mime_type, "annotations": _check_annotations(annotations)}


def _read(path: str | os.PathLike[str] | None, data: bytes | str | None) -> tuple[bytes, Path | None]:
    """Return the bytes, and the file that they are from. Raises ValueError, OSError and Failure."""
    if (path is None) == (data is None):
        raise ValueError("give either path or data")
    if path is None:
        return _decode(data), None
    found = Path(os.path.expandvars(os.fspath(path))).expanduser()
    with found.open("rb") as file:
        content = file.read(LONGEST_CONTENT + 1)
    if not content:
        raise ValueError(f"{found} is empty")
    return content, found


def _decode(data: object) -> bytes:
    if isinstance(data, str):
        if not is_base64(data):
            raise ValueError("a text given as data has to be base64: give bytes, or a path")
        return base64.b64decode(data)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"data has to be bytes or base64, not {type(data).__name__}")
    if not data:
        raise ValueError("the data is empty")
    return bytes(data)


def _encode(data: bytes | str, name: str) -> str:
    encoded = base64.b64encode(_decode(data)).decode()
    if len(encoded) > LONGEST_CONTENT:
        limit = describe_size(LONGEST_CONTENT * 3 // 4)
        raise Failure("RESULT_TOO_LARGE", f"{name}: {limit} are the most in a result; return a link, or a part of it")
    return encoded


def _check_format(format: str) -> str:
    if not _FORMAT.fullmatch(format.lower()):
        raise ValueError(f"a format is a word such as 'png', not {format!r}")
    return format.lower()


def _check_uri(uri: str) -> None:
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", uri):
        raise ValueError(f"a URI begins with a scheme, as in 'docs://readme': {uri!r} does not")


def _check_annotations(annotations: Annotations | None) -> JsonObject | None:
    """Return the annotations of a block: whom it is for, how important it is, and when it changed."""
    if annotations is None:
        return None
    if not isinstance(annotations, Mapping):  # a model of the SDK
        annotations = annotations.model_dump(by_alias=True, exclude_none=True)
    checked = dict(annotations)
    if unknown := checked.keys() - {"audience", "priority", "lastModified"}:
        raise ValueError(f"annotations are audience, priority and lastModified, not {', '.join(sorted(unknown))}")
    audience: Sequence[str] = checked.get("audience", ())
    if isinstance(audience, str) or any(each not in ("user", "assistant") for each in audience):
        raise ValueError("audience is a list of 'user' and 'assistant'")
    if not 0 <= checked.get("priority", 0) <= 1:
        raise ValueError("priority is a number from 0 to 1")
    return checked
