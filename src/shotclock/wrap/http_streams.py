"""Streams of messages to an HTTP client: one for each open request of a session, and one for everything else.

A stream outlives its connection. Events are kept until a client has read them, and for a while longer, so that a client
whose connection broke can resume after the last event that it has seen. All of this is bounded.
"""

from __future__ import annotations

import threading
from collections import deque

from ..core.clocks import NS_PER_MS
from ..core.value_types import entity
from ..process.clock import monotonic_ns
from .payloads import Payload

# Of events that wait for their reader. Long messages are in files, so that they take no memory.
MOST_WAITING_IN_MEMORY = 1024 * 1024
MOST_WAITING = 256 * 1024 * 1024
MOST_WAITING_EVENTS = 10_000
# Of events that were read, for clients that resume.
MOST_KEPT = 64 * 1024
MOST_KEPT_EVENTS = 100
# A reader that is behind delays all messages of its server. After this time it loses its connection instead.
ROOM_WITHIN_MS = 10_000


@entity
class Event:
    """A message on a stream."""

    number: int
    payload: Payload
    is_last: bool
    error_code: int | None


class Stream:
    """Events for one reader at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_ended = False
        self.lost = 0
        """Events that were dropped because no client read them."""
        self._changed = threading.Condition()
        self._waiting = deque[Event]()
        self._waiting_size = self._waiting_in_memory = 0
        self._kept = deque[Event]()  # sent once, for clients that resume
        self._kept_size = 0
        self._last_number = 0
        self._reader: StreamReader | None = None

    def put(self, payload: Payload, *, is_last: bool = False, error_code: int | None = None) -> None:
        """Add an event. Waits for a reader that is behind, within a limit."""
        with self._changed:
            give_up_ns = monotonic_ns() + ROOM_WITHIN_MS * NS_PER_MS
            while self._reader is not None and self._is_full and not self.is_ended:
                left_ns = give_up_ns - monotonic_ns()
                if left_ns <= 0:
                    self._reader = None
                else:
                    self._changed.wait(left_ns / 1e9)
            if self.is_ended:
                payload.close()
                return
            while self._is_full:
                self._pop_waiting().payload.close()
                self.lost += 1
            self._last_number += 1
            self._waiting.append(Event(self._last_number, payload, is_last, error_code))
            self._waiting_size += payload.size
            self._waiting_in_memory += payload.size_in_memory
            self.is_ended = is_last
            self._changed.notify_all()

    @property
    def is_read(self) -> bool:
        return self._reader is not None

    @property
    def size(self) -> int:
        return self._waiting_size + self._kept_size

    def attach(self, after: int | None = None) -> StreamReader:
        """Return a reader of the events after that number, by default of all unsent ones. It replaces an older one."""
        with self._changed:
            sent = self._last_number - len(self._waiting)
            self._reader = StreamReader(self, sent if after is None else min(after, self._last_number))
            self._changed.notify_all()
            return self._reader

    def can_resume(self, after: int) -> bool:
        """Return whether all later events of a call are still here. Other messages may have been lost."""
        with self._changed:
            oldest = next(iter((*self._kept, *self._waiting)), None)
            is_complete = oldest is not None and oldest.number <= after + 1 <= self._last_number
            return self.number == 0 or is_complete or (after == self._last_number and not self.is_ended)

    def close(self) -> None:
        """End the stream and drop all events."""
        with self._changed:
            self.is_ended = True
            self._reader = None
            for event in (*self._kept, *self._waiting):
                event.payload.close()
            self._kept.clear()
            self._waiting.clear()
            self._changed.notify_all()

    def take(self, reader: StreamReader, within_s: float) -> list[Event]:
        """Return the next events; none after this time, and at the end."""
        with self._changed:
            if self._reader is reader and reader.at >= self._last_number and not self.is_ended:
                self._changed.wait(within_s)
            if self._reader is not reader or reader.at >= self._last_number:
                return []
            return [event for event in (*self._kept, *self._waiting) if event.number > reader.at]

    def is_over_for(self, reader: StreamReader) -> bool:
        with self._changed:
            return self._reader is not reader or (self.is_ended and reader.at >= self._last_number)

    def note_sent(self, reader: StreamReader, number: int) -> None:
        """Note that everything up to this event was sent. Long and old events are dropped."""
        with self._changed:
            if self._reader is not reader:
                return
            while self._waiting and self._waiting[0].number <= number:
                event = self._pop_waiting()
                self._kept.append(event)
                self._kept_size += event.payload.size
            while self._kept and (self._kept_size > MOST_KEPT or len(self._kept) > MOST_KEPT_EVENTS):
                oldest = self._kept.popleft()
                self._kept_size -= oldest.payload.size
                oldest.payload.close()
            self._changed.notify_all()

    def detach(self, reader: StreamReader) -> None:
        with self._changed:
            if self._reader is reader:
                self._reader = None
                self._changed.notify_all()

    def _pop_waiting(self) -> Event:
        event = self._waiting.popleft()
        self._waiting_size -= event.payload.size
        self._waiting_in_memory -= event.payload.size_in_memory
        return event

    @property
    def _is_full(self) -> bool:
        return bool(self._waiting) and (
            len(self._waiting) >= MOST_WAITING_EVENTS
            or self._waiting_in_memory >= MOST_WAITING_IN_MEMORY
            or self._waiting_size >= MOST_WAITING
        )


class StreamReader:
    """The place of one connection in a stream."""

    def __init__(self, stream: Stream, at: int) -> None:
        self.stream = stream
        self.at = at

    @property
    def is_over(self) -> bool:
        """Return whether nothing more will come: the stream has ended, or another reader has replaced this one."""
        return self.stream.is_over_for(self)

    def take(self, within_s: float) -> list[Event]:
        return self.stream.take(self, within_s)

    def note_sent(self, event: Event) -> None:
        self.at = event.number
        self.stream.note_sent(self, event.number)

    def leave(self) -> None:
        self.stream.detach(self)
