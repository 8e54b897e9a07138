"""A sidecar for a sandboxed agent: it proposes files that say what the sandbox may do, a person decides, and only then
is anything written. See README.md beside this file.

    shotclock serve examples/supervise/sidecar.py:app --http 127.0.0.1:8700
"""

import http.client
import json
import os
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from shotclock import App, Failure

Tool = TypeVar("Tool", bound=Callable[..., Any])
# An answer that is longer is no list of routes.
MOST_ROUTES_BYTES = 256 * 1024


def config_folder() -> Path:
    folder = Path(os.environ.get("SUPERVISE_CONFIG") or Path(__file__).parent / "config").absolute()
    if not folder.is_dir():
        raise ValueError(f"SUPERVISE_CONFIG: there is no folder {folder}")
    return folder


def egress_url() -> str:
    url = os.environ.get("SUPERVISE_EGRESS_URL") or "http://127.0.0.1:8701/routes"
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ValueError(f"SUPERVISE_EGRESS_URL: {url!r} is no address of a web service")
    return url


# Here and not in the tools: what is wrong with the environment is told when the server starts.
FOLDER, EGRESS_URL = config_folder(), egress_url()
ROUTES, HOSTS, CAPABILITIES = (
    FOLDER / name for name in ("egress-routes.json", "egress-hosts.txt", "capabilities.json")
)

app = App(
    "supervise",
    version="1.0",
    default_timeout="10s",
    help="Ask the operator of your sandbox for what you may not do yet.",
)


# --- what the files may look like: mistakes are the agent's to mend, and bother no operator ---------------------------


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Route(Part):
    host: str = Field(pattern=r"^(\*\.)?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*$")
    methods: list[str] = ["GET", "HEAD"]
    paths: list[str] = ["/"]


class Routes(Part):
    routes: list[Route]


class Capabilities(Part):
    programs: list[str] = []
    devices: list[str] = []
    system_calls: list[str] = []


def fits(model: type[Part]) -> Callable[[str], str]:
    def check(text: str) -> str:
        try:
            model.model_validate_json(text)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            said = [f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}" for each in found]
            raise ValueError("; ".join(said)) from None
        return text

    return check


def lists_hosts(text: str) -> str:
    for number, line in enumerate(text.splitlines(), 1):
        host = line.partition("#")[0].strip()
        if host and not re.fullmatch(r"(\*\.)?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", host):
            raise ValueError(f"line {number}: {host[:100]!r} is no host name")
    return text


# --- the tools --------------------------------------------------------------------------------------------------------


def proposes(name: str, path: Path) -> Callable[[Tool], Tool]:
    """A command that takes the whole text of a file and why it should be so, and runs once an operator has said yes."""
    return app.command(
        name=name,
        approval={"file": {"path": path, "proposed": "proposed_file", "decision": "decision"}, "ttl": "8h"},
        idempotent=True,
        # Looking whether the file is still the one that the operator saw and replacing it are one step.
        single_flight=path.name,
        queue="5s",
        exit_codes=["ACTION_CHANGED", "FILE_UNWRITABLE"],
    )


@proposes("egress-block", ROUTES)
def egress_block(
    proposed_file: Annotated[str, AfterValidator(fits(Routes))],
    justification: str,
    decision: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A request of yours was blocked at the egress: propose the routes under which it would pass.

    Parameters
    ----------
    proposed_file
        The whole of egress-routes.json as it should be. list-egress-routes tells what holds now.
    justification
        What you wanted to reach, and what for.
    """
    return written(decision)


@proposes("egress-allow", HOSTS)
def egress_allow(
    proposed_file: Annotated[str, AfterValidator(lists_hosts)],
    justification: str,
    decision: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """You will need hosts that are not allowed: propose the list of those that are.

    Parameters
    ----------
    proposed_file
        The whole of egress-hosts.txt as it should be: one host per line, # before a remark.
    justification
        What you need them for.
    """
    return written(decision)


@proposes("capability-block", CAPABILITIES)
def capability_block(
    proposed_file: Annotated[str, AfterValidator(fits(Capabilities))],
    justification: str,
    decision: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Something is missing in your sandbox, a program, a device or a system call: propose what it should have.

    Parameters
    ----------
    proposed_file
        The whole of capabilities.json as it should be.
    justification
        What you cannot do without it.
    """
    return written(decision)


@app.command(
    name="list-egress-routes",
    timeout="5s",
    grace="0ms",
    mutates=False,
    exit_codes=["HTTP_STATUS", "CONNECT_FAILED", "FETCH_FAILED", "BODY_TOO_LARGE"],
)
def list_egress_routes() -> dict[str, Any]:
    """The routes that the egress service lets through right now, as it says itself."""
    # Straight to the service. No timeout here: connecting, waiting and reading together have the command's.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(EGRESS_URL) as answer:
            content = answer.read(MOST_ROUTES_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise Failure("HTTP_STATUS", f"the egress service answered {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise Failure("CONNECT_FAILED", f"the egress service cannot be reached: {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise Failure("FETCH_FAILED", f"the egress service broke off its answer: {error!r}") from None
    if len(content) > MOST_ROUTES_BYTES:
        raise Failure("BODY_TOO_LARGE", f"the egress service says more than {MOST_ROUTES_BYTES} bytes")
    try:
        return {"service": EGRESS_URL, "routes": json.loads(content)}
    except ValueError as error:
        raise Failure("FETCH_FAILED", f"the egress service answered with something that is not JSON: {error}") from None


# --- writing ----------------------------------------------------------------------------------------------------------


def written(decision: dict[str, Any] | None) -> dict[str, Any]:
    """The answer to whoever proposed, once the file holds what was approved."""
    if decision is None:  # somebody called the function itself
        raise Failure("NOT_ALLOWED", "nobody has approved this")
    path, text, seen = Path(decision["file"]["path"]), decision["file"]["text"], decision["file"]["current"]
    there = path.read_bytes() if path.exists() else None
    if there != (None if seen is None else seen.encode()):
        message = f"{path.name} has changed since the operator compared it: nothing was written, propose it again"
        raise Failure("ACTION_CHANGED", message)
    try:
        replace_whole(path, text)
    except OSError as error:
        raise Failure("FILE_UNWRITABLE", f"{path.name} was approved and cannot be written: {error.strerror}") from None
    return {**decision, "file": {"path": str(path), "text": text}}


def replace_whole(path: Path, text: str) -> None:
    """Whoever reads it finds the old text or the new one, also after a power cut."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(text.encode())
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


if __name__ == "__main__":
    app()
