"""The payloads in Temporal's history: encrypted, and without large ones.

With a key (SHOTCLOCK_CODEC_KEY) every payload is encrypted. Without one, runs with secrets are refused.
Large payloads are stored below SHOTCLOCK_PAYLOADS, a directory or the URL of an object store, named by their digest.
Without it large values are refused. A process that cannot read a payload says why, unencrypted.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure as WireFailure
from temporalio.converter import (
    CompositePayloadConverter,
    DataConverter,
    DefaultFailureConverter,
    DefaultFailureConverterWithEncodedAttributes,
    DefaultPayloadConverter,
    ExternalStorage,
    JSONPlainPayloadConverter,
    PayloadCodec,
    PayloadConverter,
    StorageDriver,
    StorageDriverClaim,
    StorageDriverRetrieveContext,
    StorageDriverStoreContext,
)

from ..core.errors import Failure
from ..core.value_types import JsonObject
from ..core.visible_text import Redaction
from ..flows.file.schema import WorkflowFile, ai_steps
from ..flows.run.state import HIDES, record_workflow

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_VARIABLE = "SHOTCLOCK_CODEC_KEY"
PAYLOADS_VARIABLE = "SHOTCLOCK_PAYLOADS"
KEY_BYTES = 32
THRESHOLD = 128 * 1024  # History keeps every payload, so larger ones are stored outside.
INLINE_LIMIT = 1_900_000  # of several values in one payload, without a place outside. Temporal refuses 2 MB.
# In characters of JSON. Temporal fails the task of a workflow that is busy for two seconds, again and again.
JSON_LIMIT = 10_000_000
TRANSFER_LIMIT_S = 60.0
_NONCE_BYTES = 12
_ENCODING = b"binary/shotclock-encrypted"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class UnreadablePayload(ValueError):
    """A payload that this process cannot decrypt or find. Nothing was done with it."""


def find_unreadable(error: BaseException | None) -> BaseException | None:
    while error is not None and not isinstance(error, UnreadablePayload):
        error = error.__cause__ or error.__context__
    return error


def read_keys(environ: Mapping[str, str]) -> list[bytes]:
    """Return the keys. The first encrypts; with the others, which it replaces, payloads can still be read."""
    keys: list[bytes] = []
    for text in environ.get(KEY_VARIABLE, "").replace(",", " ").split():
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            hint = "make one with: python3 -c 'import secrets; print(secrets.token_hex(32))'"
            message = f"the environment variable {KEY_VARIABLE} is not {KEY_BYTES} bytes in hexadecimal"
            raise Failure("ARG_ERROR", f"{message}, or several of them", suggestion=hint)
        keys.append(key)
    return keys


def has_place(environ: Mapping[str, str]) -> bool:
    return bool(environ.get(PAYLOADS_VARIABLE, "").strip())


def make_converter(environ: Mapping[str, str]) -> DataConverter:
    keys, threshold = read_keys(environ), THRESHOLD if has_place(environ) else INLINE_LIMIT
    return DataConverter(
        OrderedConverter,
        payload_codec=EncryptingCodec(keys),
        failure_converter_class=_EncryptedFailures if keys else _Failures,
        external_storage=ExternalStorage(drivers=[make_driver(environ)], payload_size_threshold=threshold),
    )


def refuse_large(sent: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Refuse to start a run whose file and inputs its workers could not find."""
    if not has_place(environ) and (size := len(json.dumps(sent))) > THRESHOLD:
        message = f"the file and its inputs are {size} characters of JSON, more than the {THRESHOLD} of a history"
        raise Failure("PRECONDITION", message, suggestion=_SET_PLACE)


def find_json_limit(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the most characters of JSON of one output, and why not more."""
    if has_place(environ):
        return JSON_LIMIT, "the most on this engine"
    return THRESHOLD, f"the most that history takes; for more {_SET_PLACE}"


_SET_PLACE = f"set {PAYLOADS_VARIABLE} to a directory or URL that callers and workers share"


class _Failures(DefaultFailureConverter):
    """Failures, and of one for an unreadable payload only why."""

    def to_failure(self, exception: BaseException, payload_converter: PayloadConverter, failure: WireFailure) -> None:
        super().to_failure(find_unreadable(exception) or exception, payload_converter, failure)


class _EncryptedFailures(DefaultFailureConverterWithEncodedAttributes):
    """Encrypted failures, but not why a payload cannot be read: a reader may have another key."""

    def to_failure(self, exception: BaseException, payload_converter: PayloadConverter, failure: WireFailure) -> None:
        if find_unreadable(exception) is not None:
            _Failures().to_failure(exception, payload_converter, failure)
        else:
            super().to_failure(exception, payload_converter, failure)


class _OrderedJson(JSONPlainPayloadConverter):
    """JSON with the keys of objects in their order: steps begin in the order of their file."""

    def to_payload(self, value: Any) -> Payload:
        return Payload(metadata={"encoding": b"json/plain"}, data=json.dumps(value, separators=(",", ":")).encode())


class OrderedConverter(CompositePayloadConverter):
    def __init__(self) -> None:
        *others, _ = DefaultPayloadConverter.default_encoding_payload_converters
        super().__init__(*others, _OrderedJson())


def write_workflow(workflow: WorkflowFile, inputs: Mapping[str, Any], variables: Mapping[str, str]) -> JsonObject:
    """Return the file for the engine. Refuse secrets without encryption, and what only works on one machine."""
    if workflow.notify:
        message = "`notify` of a file is not sent for runs on Temporal"
        raise Failure("PRECONDITION", message, suggestion="remove it, or run the file here, without `--on`")
    if workflow.concurrency is not None:
        message = "`concurrency` holds between the runs of one machine, and not on Temporal"
        hint = "run the file here, without `--on`, or give it another `--run-id` only after the run before has ended"
        raise Failure("PRECONDITION", message, suggestion=hint)
    for name, any_step in workflow.steps.items():
        if any_step.artifacts:
            message = f"step {name}: `artifacts` are kept on the machine of a run, and a run on Temporal has none"
            hint = "let the step upload its files itself, or run the file here, without `--on`"
            raise Failure("PRECONDITION", message, suggestion=hint)
    for step_id, step in ai_steps(workflow):
        if any(workflow.tools[name].workflow is not None for name in step.ai.tools):
            message = f"step {step_id}: a workflow cannot be an agent's tool on Temporal"
            raise Failure("PRECONDITION", message, suggestion="run the file here, without `--on`")
    if read_keys(os.environ):
        return workflow.model_dump(exclude_unset=True)
    written = record_workflow(workflow, variables)
    redaction = Redaction(variables)
    secret = [name for name, value in inputs.items() if redaction.value(value) != value]
    if HIDES not in written and not secret:
        return written
    where = "the file" if HIDES in written else f"the input {secret[0]}"
    message = f"{where} holds a secret, which would be readable in Temporal's history"
    hint = f"let the workers have it in their environment (${{NAME}}), or give them and us {KEY_VARIABLE}"
    raise Failure("PRECONDITION", message, suggestion=hint)


class EncryptingCodec(PayloadCodec):
    """Encryption of payloads with AES-256-GCM. Payloads that were sent without a key are read as they are."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._ciphers: dict[bytes, AESGCM] = {}
        if keys:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._ciphers = {_name_key(key): AESGCM(key) for key in keys}

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [self._encode(payload) for payload in payloads] if self._ciphers else list(payloads)

    async def decode(self, payloads: Iterable[Payload]) -> list[Payload]:
        return [self._decode(payload) for payload in payloads]

    def _encode(self, payload: Payload) -> Payload:
        nonce, (key_id, cipher) = os.urandom(_NONCE_BYTES), next(iter(self._ciphers.items()))
        data = nonce + cipher.encrypt(nonce, payload.SerializeToString(), key_id)
        return Payload(metadata={"encoding": _ENCODING, "key-id": key_id}, data=data)

    def _decode(self, payload: Payload) -> Payload:
        if payload.metadata.get("encoding") != _ENCODING:
            return payload
        key_id = payload.metadata.get("key-id", b"")
        if key_id not in self._ciphers:
            ours = ", ".join(each.decode() for each in self._ciphers) or "not set"
            message = f"it is encrypted with key {key_id.decode(errors='replace')}, and {KEY_VARIABLE} is {ours}"
            raise UnreadablePayload(message)
        nonce, data = payload.data[:_NONCE_BYTES], payload.data[_NONCE_BYTES:]
        return Payload.FromString(self._ciphers[key_id].decrypt(nonce, data, key_id))


def _name_key(key: bytes) -> bytes:
    """Return the public name of a key, which is in payloads and messages."""
    return hashlib.sha256(b"shotclock codec " + key).hexdigest()[:16].encode()


def make_driver(environ: Mapping[str, str]) -> StorageDriver:
    place = environ.get(PAYLOADS_VARIABLE, "").strip()
    if not place:
        return NoPlaceDriver()
    if place.startswith(("http://", "https://")):
        return HttpDriver(place.rstrip("/"))
    if place.startswith("file://"):
        place = place.removeprefix("file://")
    elif "://" in place:
        raise Failure("ARG_ERROR", f"{PAYLOADS_VARIABLE}: {place[:80]!r} is no directory, file:// or http(s):// URL")
    return DirectoryDriver(Path(place))


class _ContentDriver(StorageDriver):
    """A storage that names payloads by their digests: corrupt ones are noticed. Without a key equal ones are one."""

    _put: Callable[[str, bytes], Awaitable[None]]
    _get: Callable[[str], Awaitable[bytes]]

    def name(self) -> str:
        return "shotclock"

    def type(self) -> str:
        return "shotclock"

    async def store(self, context: StorageDriverStoreContext, payloads: Sequence[Payload]) -> list[StorageDriverClaim]:
        claims = []
        for payload in payloads:
            data = payload.SerializeToString(deterministic=True)
            digest = hashlib.sha256(data).hexdigest()
            await self._put(digest, data)
            claims.append(StorageDriverClaim({"sha256": digest}))
        return claims

    async def retrieve(
        self, context: StorageDriverRetrieveContext, claims: Sequence[StorageDriverClaim]
    ) -> list[Payload]:
        found = []
        for claim in claims:
            digest = claim.claim_data["sha256"]
            if not _DIGEST.fullmatch(digest):
                raise ValueError(f"{digest[:80]!r} names no payload")
            try:
                data = await self._get(digest)
            except FileNotFoundError as error:
                raise UnreadablePayload(f"{error.filename} is not there: {_SET_PLACE}") from None
            if hashlib.sha256(data).hexdigest() != digest:
                raise ValueError(f"payload {digest} is not what was stored")
            found.append(Payload.FromString(data))
        return found


class NoPlaceDriver(_ContentDriver):
    async def _put(self, digest: str, data: bytes) -> None:
        raise ValueError(f"{len(data)} bytes are too large for history: {_SET_PLACE}")

    async def _get(self, digest: str) -> bytes:
        raise UnreadablePayload(f"it is outside of history, and {PAYLOADS_VARIABLE} is not set: {_SET_PLACE}")


class DirectoryDriver(_ContentDriver):
    """A storage of files. Several machines have to share the directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest

    async def _put(self, digest: str, data: bytes) -> None:
        await asyncio.to_thread(self._write, digest, data)

    def _write(self, digest: str, data: bytes) -> None:
        path = self._path(digest)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{digest}.{os.getpid()}.{os.urandom(4).hex()}")
        part.write_bytes(data)
        part.replace(path)

    async def _get(self, digest: str) -> bytes:
        return await asyncio.to_thread(self._path(digest).read_bytes)


class HttpDriver(_ContentDriver):
    def __init__(self, url: str) -> None:
        self._url = url

    async def _put(self, digest: str, data: bytes) -> None:
        await self._send("PUT", digest, data)

    async def _get(self, digest: str) -> bytes:
        return await self._send("GET", digest)

    async def _send(self, method: str, digest: str, data: bytes | None = None) -> bytes:
        import httpx2

        async with asyncio.timeout(TRANSFER_LIMIT_S), httpx2.AsyncClient() as client:
            answer = await client.request(method, f"{self._url}/{digest}", content=data)
            if answer.status_code == 404:
                raise FileNotFoundError(errno.ENOENT, "", f"{self._url}/{digest}")
            answer.raise_for_status()
            return bytes(answer.content)
