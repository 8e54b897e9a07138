"""asyncio as our programs import it: without what few of them use, which is there all the same once it is used."""

import subprocess
import sys

# An interpreter that imports all that it can, on a busy machine.
RUN_WITHIN_S = 60.0

ABSENT = "import sys; from shotclock import Runtime; left_out = {'ssl', '_ssl', 'asyncio.sslproto'}\n"
ABSENT += "assert 'asyncio' in sys.modules and not left_out & sys.modules.keys(), left_out & sys.modules.keys()\n"
TLS = """
import asyncio
import socket

async def pass_on(text):  # as a plain socket is read, which asyncio compares with those of TLS
    one, two = socket.socketpair()
    for each in (one, two):
        each.setblocking(False)
    with one, two:
        await asyncio.get_running_loop().sock_sendall(one, text)
        return await asyncio.get_running_loop().sock_recv(two, 100)

assert asyncio.run(pass_on(b"plain")) == b"plain" and "ssl" not in sys.modules
assert isinstance(asyncio.base_events.ssl.SSLContext, type) and "ssl" in sys.modules
import ssl

try:
    asyncio.base_events._check_ssl_socket(object.__new__(ssl.SSLSocket))
except TypeError:
    pass
else:
    raise AssertionError("a socket of TLS was taken for a plain one")

def context(purpose):
    made = ssl.SSLContext(purpose)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    made.maximum_version = ssl.TLSVersion.TLSv1_2
    made.set_ciphers("AECDH:@SECLEVEL=0")  # without a certificate
    return made

async def echo(reader, writer):
    writer.write(await reader.readline())
    await writer.drain()
    writer.close()

async def main():
    async with asyncio.timeout(20):
        server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context(ssl.PROTOCOL_TLS_SERVER))
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context(ssl.PROTOCOL_TLS_CLIENT))
        writer.write(b"over TLS\\n")
        print((await reader.readline()).decode(), end="")
        assert isinstance(writer.get_extra_info("ssl_object"), ssl.SSLObject)
        writer.close()
        server.close()

asyncio.run(main())
assert type(asyncio.sslproto) is type(ssl)
"""
LIBRARIES = """
import asyncio
print(asyncio.sslproto.SSLProtocol.__name__)  # as some libraries read it, without importing it
import inspect, ssl, textwrap, tokenize, locale
assert {type(each) for each in (inspect, ssl, textwrap, tokenize, locale)} == {type(sys)}
assert asyncio.iscoroutinefunction(asyncio.sleep) and not asyncio.iscoroutinefunction(asyncio.run)
assert asyncio.base_events.ssl.SSLContext is ssl.SSLContext
"""
FAILING = """
import asyncio, traceback
async def fail():
    raise ValueError("with its source line")
try:
    asyncio.run(fail())
except ValueError:
    print(traceback.format_exc().count("ValueError: with"))
"""
EARLIER = "import ssl, asyncio; from shotclock import Runtime; print(asyncio.base_events.ssl is ssl)"


def _say(program: str) -> str:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=RUN_WITHIN_S)
    assert ran.returncode == 0, ran
    return ran.stdout.strip()


def test_connections_with_tls_work_as_ever() -> None:
    assert _say(ABSENT + TLS) == "over TLS"


def test_libraries_find_what_they_read_of_asyncio() -> None:
    assert _say(ABSENT + LIBRARIES) == "SSLProtocol"


def test_a_traceback_has_what_it_needs() -> None:
    assert _say(ABSENT + FAILING) == "1"


def test_an_asyncio_that_is_imported_already_stays_as_it_is() -> None:
    assert _say(EARLIER) == "True"
