"""The preloaded zygote: the users' modules are imported, then workers are forked."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import sysconfig
import types
import warnings
from typing import NoReturn

from ..supervise import kernel
from ..supervise.zygote import ZYGOTE_NAME, serve_forks
from . import main as worker_main
from . import running_call

MOST_FILES = 2_000


def become_zygote_of(requests: socket.socket) -> NoReturn:
    """Become a zygote in a fork of the program itself, with everything imported."""
    worker_main.inside_worker = True
    sys.modules[running_call.MAIN_ALIAS] = sys.modules["__main__"]
    kernel.name_process(ZYGOTE_NAME)
    kernel.replace_by_null(0)
    # Only the program's answer goes to stdout, not the output of functions.
    os.dup2(2, 1)
    fd = os.dup(requests.fileno())
    os.closerange(3, fd)
    os.closerange(fd + 1, fd + 256)
    worker_main.prepare_forks(serves_many=False)
    serve_forks(socket.socket(fileno=fd))


def prepare(
    _: str,
    path: list[str],
    modules: list[str],
    handlers: list[tuple[str, str]],
    main_module: str | None,
    main_file: str | None,
    environment: dict[str, str],
) -> None:
    """Import the modules of the workers. The call that needs a failing import reports it."""
    os.environ.clear()
    os.environ.update(environment)
    # Imports of users may start threads; Python would warn at each fork.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
    sys.path[:] = path
    worker_main.inside_worker = True
    from ..core.arguments import signature_of, to_jsonable

    for name in modules:
        with contextlib.suppress(BaseException):  # a program may exit when it is imported
            importlib.import_module(name)
    try:
        _import_main(main_module, main_file)
    except BaseException as error:
        running_call.main_import_error = f"{type(error).__name__}: {error}"
    for module, name in handlers:
        with contextlib.suppress(BaseException):  # a function that makes an App may exit as well
            signature_of(running_call.find(module, name))
    if "pydantic" in sys.modules:
        # Late imports happen here once, not in the first call of each worker; a program without pydantic need not wait.
        signature_of(prepare).build_model()
        to_jsonable(b"")
    worker_main.prepare_forks()


def _import_main(main_module: str | None, main_file: str | None) -> None:
    """Import the main program under another name, so that its functions can be found."""
    import runpy

    name = running_call.MAIN_ALIAS
    if main_module is not None:
        namespace = runpy.run_module(main_module, run_name=name, alter_sys=True)
    elif main_file is not None:
        namespace = runpy.run_path(main_file, run_name=name)
    else:
        return
    module = sys.modules["__main__"] = sys.modules[name] = types.ModuleType(name)
    module.__dict__.update(namespace)


def source_files() -> list[str]:
    """Return the files that the program was imported from: neither installed nor ours."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    foreign = tuple(os.path.join(folder, "") for folder in (*installed, os.path.dirname(os.path.dirname(__file__))))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = {os.path.realpath(file) for file in files if isinstance(file, str) and file.endswith(".py")}
    return sorted(path for path in paths if not path.startswith(foreign))[:MOST_FILES]
