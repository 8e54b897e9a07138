"""How one gets in to an engine: its address, TLS, mTLS and API keys, from the command line to a server that asks for
them."""

import asyncio
import json
import os
import shlex
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hpack
import pytest

from shotclock.dispatch.engines import AddressError
from shotclock.temporal.connection import parse_address, read_address
from tests.certificates import certificate
from tests.temporal.conftest import WITHIN_S, Cluster, Program, Runs

LONGEST_HEADER = 1_000_000


def test_an_address_names_host_port_and_namespace() -> None:
    assert parse_address("temporal://localhost") == ("localhost", 7233, "default")
    assert parse_address("temporal://ns.acct.tmprl.cloud:7233/ns.acct") == ("ns.acct.tmprl.cloud", 7233, "ns.acct")
    assert parse_address("temporal://[::1]:7233/prod") == ("[::1]", 7233, "prod")
    for text in ("localhost:7233", "http://localhost", "temporal://", "temporal://a:99999", "temporal://u@h"):
        with pytest.raises(ValueError):
            parse_address(text)


def test_tls_and_keys_are_read_from_the_variables_of_temporal_itself(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "authority", None)
    certificate(tmp_path, "client", authority)
    cert, key = tmp_path / "client.pem", tmp_path / "client.key"
    plain = read_address("temporal://h", {})
    assert not plain.tls and plain.api_key is None
    with_key = read_address("temporal://h", {"TEMPORAL_API_KEY": "k"})
    assert with_key.tls and with_key.api_key == "k"
    variables = {
        "TEMPORAL_TLS_CLIENT_CERT_PATH": str(cert),
        "TEMPORAL_TLS_CLIENT_KEY_PATH": str(key),
        "TEMPORAL_TLS_SERVER_NAME": "n",
    }
    mutual = read_address("temporal://h", variables)
    assert mutual.tls and (mutual.cert, mutual.key, mutual.server_name) == (cert.read_bytes(), key.read_bytes(), "n")
    assert mutual.on_command_line == "--on temporal://h:7233/default", "the variables are there for the next command"
    assert read_address("temporal://h", {"TEMPORAL_TLS": "true"}).tls
    assert not read_address("temporal://h", {"TEMPORAL_TLS": "false", "TEMPORAL_API_KEY": "k"}).tls


def test_an_option_goes_before_its_variable_and_is_in_the_words_for_the_next_command(tmp_path: Path) -> None:
    (tmp_path / "its key").write_text("from-the-file\n")
    said = {"tls": True, "tls_server_name": "mine", "api_key_file": str(tmp_path / "its key")}
    address = read_address("temporal://h", {"TEMPORAL_API_KEY": "k", "TEMPORAL_TLS_SERVER_NAME": "theirs"}, said)
    assert (address.tls, address.server_name, address.api_key) == (True, "mine", "from-the-file")
    assert address.on_command_line == (
        f"--on temporal://h:7233/default --tls --tls-server-name mine --api-key-file '{tmp_path}/its key'"
    )


def refused(said: dict[str, object], environ: dict[str, str] | None = None) -> dict[str, str]:
    with pytest.raises(AddressError) as caught:
        read_address("temporal://h", environ or {}, said)
    return {mistake["field"]: mistake["message"] for mistake in caught.value.mistakes}


def test_what_cannot_open_anything_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "authority", None)
    for name in ("client", "other"):
        certificate(tmp_path, name, authority)
    (tmp_path / "noise").write_text("no certificate")
    (tmp_path / "two words").write_text("a key")
    os.mkfifo(tmp_path / "pipe")
    cert, key, other = (str(tmp_path / name) for name in ("client.pem", "client.key", "other.key"))
    assert refused({"tls_cert_path": cert}) == {
        "tls-cert-path": "a certificate without its key: --tls-key-path names it"
    }
    assert "without its certificate" in refused({"tls_key_path": key})["tls-key-path"]
    found = refused({"tls_cert_path": cert, "tls_key_path": "/no/such", "api_key_file": str(tmp_path)})
    assert found == {"tls-key-path": "'/no/such' is not there", "api-key-file": "it is no file"}
    assert "mismatch" in refused({"tls_cert_path": cert, "tls_key_path": other})["tls-cert-path"].lower()
    assert "holds no certificates" in refused({"tls_ca_path": str(tmp_path / "noise")})["tls-ca-path"]
    assert "is no file" in refused({"tls_ca_path": str(tmp_path / "pipe")})["tls-ca-path"], "a pipe is not waited for"
    found = refused({"api_key_file": str(tmp_path / "two words")})
    assert "one word" in found["api-key-file"] and "a key" not in found["api-key-file"]
    assert set(refused({"tls": False, "tls_ca_path": cert})) == {"tls"}
    found = refused({}, {"TEMPORAL_TLS_CLIENT_KEY_PATH": key, "TEMPORAL_TLS": "perhaps"})
    assert set(found) == {"on"}, "a variable is named by the message"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["run", "flow.yaml"], ["worker"], ["inbox", "list"], ["serve", "x.py:app", "--http", "127.0.0.1:0"]],
    ids=lambda words: "-".join(words[:2]),
)  # fmt: skip
def test_every_subcommand_with_an_engine_takes_them_and_refuses_them_alike(words: list[str], tmp_path: Path) -> None:
    Runs(tmp_path, None).write("steps: {a: {type: command, exec: echo a}}")
    bad = ["--tls-cert-path", "nowhere.pem", "--api-key", "sesame-sesame"]
    program = Program([*words, "--json", "--on", "temporal://127.0.0.1:9", *bad], tmp_path, "bad")
    code, envelope = program.ended()
    found = {mistake["field"]: mistake["message"] for mistake in envelope["error"]["errors"]}
    assert code == 2 and envelope["error"]["code"] == "ARG_ERROR", envelope
    assert "is not there" in found["tls-cert-path"] or "without its key" in found["tls-cert-path"]
    assert "did you mean --api-key-file" in found["--api-key"] and "sesame" not in json.dumps(envelope)
    if words != ["worker"]:
        code, envelope = Program([*words, "--json", "--tls"], tmp_path, "alone").ended()
        found = {mistake["field"]: mistake["message"] for mistake in envelope["error"]["errors"]}
        assert code == 2 and found["tls"] == "--tls needs --on"


class TlsProxy:
    """Ends TLS before an engine that speaks none, wants a certificate of every client, and reads what they say of
    themselves."""

    def __init__(self, folder: Path, engine_port: int) -> None:
        self.headers: list[dict[str, str]] = []
        self.clients: set[str] = set()
        self._engine_port = engine_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "server.pem", folder / "server.key")
        self._context.load_verify_locations(folder / "authority.pem")
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._context.set_alpn_protocols(["h2"])
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._thread.start()
        assert self._listening.wait(WITHIN_S)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._stop.wait()  # by close()
        server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificate = writer.get_extra_info("peercert")
        self.clients.add(dict(pair[0] for pair in certificate["subject"])["commonName"])
        there, back = await asyncio.open_connection("127.0.0.1", self._engine_port)
        heard = _HeaderReader(self.headers)
        ways = [self._pump(reader, back, heard.feed), self._pump(there, writer, lambda data: None)]
        await asyncio.wait([asyncio.ensure_future(way) for way in ways], return_when=asyncio.FIRST_COMPLETED)
        writer.close()
        back.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hear: Any) -> None:
        try:
            while data := await reader.read(65536):  # until either end closes
                hear(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WITHIN_S)


class _HeaderReader:
    """Reads the headers of requests out of a connection of HTTP/2."""

    HEADERS, CONTINUATION, PADDED, PRIORITY = 1, 9, 0x8, 0x20
    PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

    def __init__(self, found: list[dict[str, str]]) -> None:
        self._found, self._held, self._skip = found, b"", self.PREFACE
        self._decoder = hpack.Decoder(max_header_list_size=LONGEST_HEADER)

    def feed(self, data: bytes) -> None:
        self._held += data
        if self._skip:
            if len(self._held) < self._skip:
                return
            self._held, self._skip = self._held[self._skip :], 0
        while len(self._held) >= 9 and len(self._held) >= 9 + (size := int.from_bytes(self._held[:3], "big")):
            kind, flags, frame = self._held[3], self._held[4], self._held[9 : 9 + size]
            self._held = self._held[9 + size :]
            assert kind != self.CONTINUATION, "headers of ours are short"
            if kind == self.HEADERS:
                if flags & self.PADDED:
                    frame = frame[1 : len(frame) - frame[0]]
                self._found.append(dict(self._decoder.decode(frame[5:] if flags & self.PRIORITY else frame)))


@pytest.fixture
def proxy(cluster: Cluster, tmp_path: Path) -> Iterator[TlsProxy]:
    authority = certificate(tmp_path, "authority", None)
    certificate(tmp_path, "server", authority)
    certificate(tmp_path, "client", authority)
    certificate(tmp_path, "stranger", None)
    made = TlsProxy(tmp_path, cluster.port)
    yield made
    made.close()


API_KEY = "tmprl-sesame-open-0123456789"


@pytest.mark.slow
def test_a_run_and_its_worker_reach_an_engine_behind_mtls_with_a_key_that_no_step_sees(
    proxy: TlsProxy, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "api key").write_text(f"{API_KEY}\n")
    opens = ["--on", f"temporal://localhost:{proxy.port}", "--tls-ca-path", "authority.pem"]
    opens += ["--tls-cert-path", "client.pem", "--tls-key-path", "client.key", "--api-key-file", "api key"]
    queue = f"tls-{time.monotonic_ns()}"
    worker = Program(["worker", *opens, "--queue", queue, "--drain", "1s"], tmp_path, "worker")
    runs, run_id = Runs(tmp_path, None), f"tls-{time.monotonic_ns()}"
    try:
        worker.wait_for_line("takes up to")
        code, envelope = runs.run(
            """
            steps:
              looks: {type: command, exec: "env; cat 'api key' client.key"}
              asks: {type: human-input, prompt: "Well?", depends_on: [looks]}
            """,
            *opens, "--queue", queue, "--run-id", run_id, "--budget", "1s",
        )  # fmt: skip
        assert code == 14, envelope
        said = envelope["data"]["steps"]["looks"]["output"]
        assert "BEGIN PRIVATE KEY" in said and API_KEY not in said and "***" in said
        assert "TEMPORAL" not in said and API_KEY not in json.dumps(envelope)
        (waits,) = envelope["data"]["waiting"]
        listed = Program(["inbox", "list", "--json", *opens], tmp_path, "list").ended()
        assert waits["proposal_id"] in json.dumps(listed)
        words = ["inbox", "approve", waits["proposal_id"], "--answer", "yes", "--json"]
        assert Program([*words, *opens], tmp_path, "approve").ended()[0] == 0
        words = envelope["data"]["continue_command"].removeprefix("shotclock ")
        code, envelope = Program([*shlex.split(words), "--json"], tmp_path, "again").ended()
        assert code == 0 and envelope["data"]["steps"]["asks"]["output"] == "yes", envelope
        code, told = Program(["report", run_id, "--json", *opens], tmp_path, "report").ended()
        assert code == 0 and told["data"]["status"] == "succeeded"
    finally:
        worker.stop()
        runs.close()
    assert proxy.clients == {"client"}
    keys = {header.get("authorization") for header in proxy.headers}
    assert keys == {f"Bearer {API_KEY}"}, "every request, and none without"
    assert any(header[":path"].endswith("/StartWorkflowExecution") for header in proxy.headers)
    assert API_KEY not in asyncio.run(asyncio.wait_for(read_history(cluster.url, run_id), WITHIN_S))


async def read_history(url: str, run_id: str) -> str:
    from shotclock.temporal.connection import connect

    client = await connect(read_address(url, {}))
    return (await client.get_workflow_handle(run_id).fetch_history()).to_json()


def test_whoever_is_not_trusted_is_told_so_within_seconds(proxy: TlsProxy, tmp_path: Path) -> None:
    on, began = f"temporal://localhost:{proxy.port}", time.monotonic()
    trusts = ["--tls-ca-path", "authority.pem"]
    ours = [*trusts, "--tls-cert-path", "client.pem", "--tls-key-path", "client.key"]
    ways = {
        "plain": [],
        "unknown-server": ["--tls"],
        "no-certificate": trusts,
        "stranger": [*trusts, "--tls-cert-path", "stranger.pem", "--tls-key-path", "stranger.key"],
        "wrong-name": [*ours, "--tls-server-name", "elsewhere.example"],
    }
    asked = {name: Program(["report", "r", "--json", "--on", on, *way], tmp_path, name) for name, way in ways.items()}
    why = {
        "plain": "speaks TLS", "unknown-server": "is not trusted here", "no-certificate": "closed the connection",
        "stranger": "closed the connection", "wrong-name": "for another name",
    }  # fmt: skip
    for name, program in asked.items():
        code, envelope = program.ended()
        assert code == 12 and envelope["error"]["code"] == "CONNECT_FAILED", (name, envelope)
        assert why[name] in envelope["error"]["message"] and "--tls" in envelope["error"]["suggestion"], envelope
    assert not proxy.headers and time.monotonic() - began < WITHIN_S


def test_every_command_on_a_namespace_that_is_not_there_names_the_command_that_creates_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "flow.yaml").write_text("steps: {a: {type: command, exec: echo a}}")
    for words in (["worker"], ["run", "flow.yaml"], ["report"]):
        program = Program([*words, "--json", "--on", f"{cluster.url}/nowhere"], tmp_path, words[0])
        code, envelope = program.ended()
        assert code == 12 and envelope["error"]["message"] == "there is no namespace 'nowhere'", envelope
        assert "namespace create --namespace nowhere" in envelope["error"]["suggestion"], envelope
        assert "takes up to" not in program.err.read_text() and "Traceback" not in program.err.read_text()


@pytest.mark.parametrize(
    ("host", "why"), [("127.0.0.1:1", "no server listens"), ("no.invalid", "this host name is unknown")]
)
def test_an_engine_that_is_not_there_is_told_in_words(host: str, why: str, tmp_path: Path) -> None:
    code, envelope = Program(["job", "list", "--json", "--on", f"temporal://{host}"], tmp_path, "list").ended()
    assert code == 12 and why in envelope["error"]["message"] and "tonic" not in envelope["error"]["message"], envelope
    assert "engine dev" in envelope["error"]["suggestion"]


@pytest.mark.parametrize("heartbeat", ["0s", "1ms", "999ms"])
def test_a_heartbeat_that_no_worker_could_keep_is_refused(heartbeat: str, tmp_path: Path) -> None:
    runs = Runs(tmp_path, "temporal://127.0.0.1:9")
    code, envelope = runs.run("steps: {a: {type: command, exec: echo a}}", "--heartbeat", heartbeat)
    assert code == 2 and "at least 1000 ms" in envelope["error"]["message"], envelope


def test_a_port_that_somebody_has_is_not_taken_for_the_server_of_ours(cluster: Cluster, tmp_path: Path) -> None:
    program = Program(["engine", "dev", "--json", "--port", str(cluster.port)], tmp_path, "engine")
    code, envelope = program.ended()
    assert code == 4 and f"port {cluster.port} cannot be had" in envelope["error"]["message"], envelope
    assert "answers" not in program.err.read_text()
