"""A daemon that answers each execution as its `taskId` says, word by word: `begun step:0 ok:0 close`.

Run as a program, because a client kills the daemon that stays silent. It prints a line when it is ready, and the
command's id when a script has come to its `silent`, which lasts until a line comes from stdin.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
from typing import Any

from shotclock.supervise import private_socket
from shotclock.ui import client

SILENT_LIMIT_S = 60.0


def answer(connection: socket.socket) -> None:
    connection.setblocking(True)
    connection.settimeout(SILENT_LIMIT_S)
    with connection:
        written = connection.makefile().readline()
        if not written:  # it only looked whether a daemon is here
            return
        request = json.loads(written)
        execution: Any = request.get("execution")

        def send(**message: Any) -> None:
            connection.sendall(json.dumps({"commandId": request["commandId"], **message}).encode() + b"\n")

        for word in execution["taskId"].split():
            verb, _, text = word.partition(":")
            place, _, code = text.partition(":")
            action = execution["actions"][int(place)] if place else {"id": "", "type": ""}
            step = {"id": action["id"], "actionType": action["type"]}
            if verb == "opening":
                send(mayTakeMs=5_000)
            elif verb == "begun":
                send(begun=True)
            elif verb == "step":
                send(event={"event": "step", **step, "index": int(place)})
            elif verb == "ok":
                send(event={"event": "stepResult", **step, "success": True, "data": {}})
            elif verb == "fail":
                send(event={"event": "stepResult", **step, "success": False, "data": {"code": code}})
            elif verb == "garbage":
                connection.sendall(b"no json\n")
            elif verb == "odd":
                send(envelope={"ok": False, "data": {}, "error": None, "warnings": [], "meta": {}})
            elif verb == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif verb == "silent":
                print(request["commandId"], flush=True)
                has_left = connection in select.select([connection, sys.stdin], [], [], SILENT_LIMIT_S)[0]
                if has_left:
                    return
            elif verb == "good":
                meta = {"exit_code": 0, "ending": "finished", "side_effects": "complete"}
                send(
                    envelope={"ok": True, "data": {"text": "x" * 100_000}, "error": None, "warnings": [], "meta": meta}
                )
                print("answered", flush=True)


def main(device: str) -> None:
    os.makedirs(client.folder(), exist_ok=True)
    listener = private_socket.listen(f"{client.stem_of(device)}.sock")
    listener.setblocking(True)
    print("ready", flush=True)
    while True:  # until the test kills it
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
