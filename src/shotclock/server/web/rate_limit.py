"""How often somebody may ask: a bucket of tokens each, which fills up again with time."""

from __future__ import annotations

from collections import OrderedDict

from ...core.records import dataclass
from ...process.clock import monotonic_ns

# Whoever asks is remembered until so many others have asked since. Names come from credentials, addresses from sockets.
MOST_REMEMBERED = 4_096
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rate:
    per_second: float
    burst: int


class Buckets:
    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._left: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def take(self, who: str) -> int:
        """0 if one more is fine, else in how many milliseconds it will be."""
        now = monotonic_ns()
        left, at = self._left.get(who, (float(self._rate.burst), now))
        left = min(self._rate.burst, left + (now - at) * self._rate.per_second / NS_PER_S)
        wait_ms = 0 if left >= 1 else int((1 - left) / self._rate.per_second * 1000) + 1
        self._left[who] = (left if wait_ms else left - 1, now)
        self._left.move_to_end(who)
        if len(self._left) > MOST_REMEMBERED:
            self._left.popitem(last=False)
        return wait_ms
