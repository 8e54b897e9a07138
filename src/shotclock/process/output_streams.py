"""An output pipe of the work: read as it comes, kept within bounds or passed on without waiting for its reader."""

from __future__ import annotations

import errno
import os
import select

from .output_capture import Capture

READ_SIZE = 256 * 1024
# POLLOUT promises room for this much in a pipe, so a write of it cannot block.
RELAY_WRITE = 4096
RELAY_HELD = 64 * 1024


class Stream:
    def __init__(self, fd: int, capture: Capture | None, relay_to: int) -> None:
        self.fd = fd
        self.capture = capture
        self.relay_to = relay_to
        self.held = bytearray()
        self.trouble = 0
        """Why what was relayed could not be written on: an errno. That a reader left is none."""
        os.set_blocking(fd, False)

    @property
    def open(self) -> bool:
        return self.fd >= 0

    @property
    def busy(self) -> bool:
        return self.open or bool(self.held)

    def read(self) -> bool:
        """Take what is there. True if there was anything."""
        try:
            chunk = os.read(self.fd, READ_SIZE if self.capture else RELAY_HELD)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return False
        if self.capture is not None:
            self.capture.add(chunk)
        else:
            self.held += chunk
        return True

    def write(self) -> None:
        if not _takes_more(self.relay_to):  # both streams may be the same pipe, and the other was faster
            return
        try:
            written = os.write(self.relay_to, self.held[:RELAY_WRITE])
        except OSError as error:  # nobody reads any more: let the work find out the way it would without us
            self.trouble = 0 if error.errno == errno.EPIPE else error.errno or errno.EIO
            self.held.clear()
            self.close()
            return
        del self.held[:written]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _takes_more(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(0))
