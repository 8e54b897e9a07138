"""A small real issuer on loopback: metadata, keys, and the authorisation-code flow with PKCE. It can misbehave."""

import base64
import hashlib
import json
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
LONGEST_HANG_S = 30.0


class TestIssuer:
    """`answers` has what each path answers with, if not the ordinary: a function of the handler."""

    __test__ = False

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {"first": RSA_KEY}
        self.asked: list[str] = []
        self.answers: dict[str, Callable[[Any], None]] = {}
        self.codes: dict[str, dict[str, str]] = {}
        self.registered: list[dict[str, Any]] = []
        self.url = ""
        self.hang_until = threading.Event()

    def token(self, resource: str, kid: str = "first", headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """A claim that is None is left out."""
        key = self.keys[kid]
        payload = {"iss": self.url, "aud": resource, "sub": "ada", "exp": int(time.time()) + 300, **claims}
        return jwt.encode(
            {name: value for name, value in payload.items() if value is not None},
            key,
            "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256",
            {"kid": kid, **(headers or {})},
        )

    def rotate(self, kid: str) -> None:
        self.keys = {kid: ec.generate_private_key(ec.SECP256R1())}

    def jwks(self) -> dict[str, Any]:
        return {
            "keys": [
                {"kid": kid, "use": "sig", **_algorithm(key).to_jwk(key.public_key(), as_dict=True)}
                for kid, key in self.keys.items()
            ]
        }

    def metadata(self) -> dict[str, Any]:
        return {
            "issuer": self.url,
            "jwks_uri": f"{self.url}/keys",
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "registration_endpoint": f"{self.url}/register",
            "response_types_supported": ["code"],
            "grant_types_supported": ["authorization_code"],
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": ["none"],
            "authorization_response_iss_parameter_supported": True,
        }

    def fetches_of_keys(self) -> int:
        return self.asked.count("/keys")

    def authorise(self, asked: dict[str, str]) -> str:
        """Consent at once, and return where the browser is sent."""
        code = secrets.token_hex(8)
        self.codes[code] = asked
        answer = {"code": code, "state": asked["state"], "iss": self.url}
        return f"{asked['redirect_uri']}?{urlencode(answer)}"

    def redeem(self, form: dict[str, str]) -> dict[str, Any]:
        asked = self.codes.pop(form["code"])
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == asked["code_challenge"]
        assert form["resource"] == asked["resource"]
        token = self.token(form["resource"], scope=asked.get("scope", ""))
        return {"access_token": token, "token_type": "Bearer", "expires_in": 300, "scope": asked.get("scope", "")}


def _algorithm(key: Any) -> Any:
    return RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm


def _handler(issuer: TestIssuer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            issuer.asked.append(url.path)
            if url.path in issuer.answers:
                issuer.answers[url.path](self)
            elif url.path == "/.well-known/oauth-authorization-server":
                self.send(issuer.metadata())
            elif url.path == "/keys":
                self.send(issuer.jwks())
            elif url.path == "/authorize":
                asked = {name: values[0] for name, values in parse_qs(url.query).items()}
                self.send_response(302)
                self.send_header("Location", issuer.authorise(asked))
                self.end_headers()
            else:
                self.send({}, 404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            issuer.asked.append(self.path)
            if self.path == "/register":
                client = {**json.loads(body), "client_id": "client"}
                issuer.registered.append(client)
                self.send(client, 201)
            else:
                self.send(issuer.redeem({name: values[0] for name, values in parse_qs(body).items()}))

        def send(self, document: Any, status: int = 200) -> None:
            content = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def issuing(certificate: Path | None = None) -> Iterator[TestIssuer]:
    """Run an issuer; with a certificate, whose key is beside it, over TLS."""
    issuer = TestIssuer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(issuer))
    server.daemon_threads = True
    issuer.url = f"http://127.0.0.1:{server.server_address[1]}"
    if certificate is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, certificate.with_suffix(".key"))
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        issuer.url = f"https://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        issuer.hang_until.set()
        server.shutdown()
        server.server_close()
        thread.join(LONGEST_HANG_S)
