"""Durations as people write them, and as the program holds them: whole milliseconds.

`500ms`, `30s`, `5m`, `1h30m`, `1.5s`, `2d`, and ISO 8601 `PT1H30M`. A bare number is refused unless the
caller says which unit it is in, because guessing between seconds and milliseconds is how a minute becomes
sixteen hours. `0` alone is unambiguous and means "none" to whoever asks for a clock.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Ten years. Far beyond any sane clock, far below where nanoseconds leave a signed 64-bit integer.
MAX_MS = 10 * 365 * 24 * 3600 * 1000

_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
# Compiled where they are first needed: `exec --timeout 5s` needs none of them.
_PART = rf"({_NUMBER})(ms|s|m|h|d)"
_COMPACT = rf"(?:{_NUMBER}(?:ms|s|m|h|d))+"
_ISO = rf"P(?:(?P<d>{_NUMBER})D)?(?:T(?=[0-9])(?:(?P<h>{_NUMBER})H)?(?:(?P<m>{_NUMBER})M)?(?:(?P<s>{_NUMBER})S)?)?"
_BARE = rf"[+-]?(?:{_NUMBER}|inf(?:inity)?|nan)"
_ORDER = ["d", "h", "m", "s", "ms"]


class DurationError(ValueError):
    """A text or number that is not a duration; the message says why and what would be."""


def parse_duration_ms(value: object, *, bare: str | None = None) -> int:
    """Return the duration in milliseconds. `bare` names the unit ("ms" or "s") of a number written without one."""
    if isinstance(value, bool):
        raise DurationError(f"{value!r} is not a duration: write 30s, 500ms, 1h30m or PT30S")
    if isinstance(value, int | float):
        return _of_number(float(value) if isinstance(value, float) else value, bare)
    if not isinstance(value, str):
        if hasattr(value, "total_seconds") and not isinstance(value, type):
            return _of_timedelta(value)
        raise DurationError(f"a {type(value).__name__} is not a duration: write 30s, 500ms, 1h30m or PT30S")
    text = value.strip()
    if len(text) > 64:
        raise DurationError(f"{text[:20]!r}… is too long to be a duration")
    unit = text.lstrip("0123456789")
    if unit in _UNIT_MS and unit != text:  # nearly always
        return _of_parts(text, [(unit, text.removesuffix(unit))])
    if re.fullmatch(_BARE, text, re.ASCII | re.IGNORECASE):
        number = float(text) if not text.isdecimal() else int(text)
        return _of_number(number, bare)
    if text.startswith("-"):
        raise DurationError(f"{text!r} is negative: write a time above 0, as in 30s, or 0 for no limit")
    if re.fullmatch(_COMPACT, text, re.ASCII):
        return _of_parts(text, [(unit, number) for number, unit in re.findall(_PART, text, re.ASCII)])
    iso = re.fullmatch(_ISO, text, re.ASCII)
    if iso and any(iso.groups()):
        return _of_parts(text, [(unit, number) for unit, number in iso.groupdict().items() if number])
    raise DurationError(f"{text!r} is not a duration: write 30s, 500ms, 1h30m or PT30S")


def format_duration(ms: int) -> str:
    """Return the shortest compact form that parses back to the same number of milliseconds."""
    if ms <= 0:
        return "0ms" if ms == 0 else f"-{format_duration(-ms)}"
    whole, text = ms, ""
    for unit in ("d", "h", "m"):
        count, whole = divmod(whole, _UNIT_MS[unit])
        if count:
            text += f"{count}{unit}"
    if whole and not text and whole < 1000:
        return f"{whole}ms"
    if whole:
        text += f"{whole // 1000}.{whole % 1000:03d}".rstrip("0").rstrip(".") + "s"
    return text


def in_seconds(ms: int) -> str:
    """Return the duration in words: 1 second, 2.5 seconds."""
    if ms == 1000:
        return "1 second"
    return f"{ms / 1000:g} seconds" if ms < 10**9 else f"{ms // 1000} seconds"


def _of_timedelta(delta: Any) -> int:
    microseconds = (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
    if microseconds < 0:
        raise DurationError(f"{delta} is negative: write a time above 0, as in 30s, or 0 for no limit")
    ms, rest = divmod(microseconds, 1000)
    if rest:
        raise DurationError(f"{delta} is too exact: write whole milliseconds, as in 1500ms")
    return _checked(ms, str(delta))


def _of_number(number: float | int, bare: str | None) -> int:
    if isinstance(number, float) and number - number != 0:  # infinite, or no number at all
        raise DurationError(f"{number} is not a duration: leave the clock out (or write 0) for none")
    if isinstance(number, int) and number.bit_length() > 64:
        raise DurationError("that number is too large: ten years is the most")
    if number < 0:
        raise DurationError(f"{number:g} is negative: write a time above 0, as in 30s, or 0 for no limit")
    if number == 0:
        return 0
    if bare is None:
        raise DurationError(f"{number} is ambiguous: write {number}s for seconds or {number}ms for milliseconds")
    return _checked(number * _UNIT_MS[bare], str(number))


def _of_parts(text: str, parts: list[tuple[str, str]]) -> int:
    units = [unit for unit, _ in parts]
    if units != sorted(set(units), key=_ORDER.index):
        raise DurationError(f"{text!r} is ambiguous: write each unit once, the largest first, as in 1h30m")
    # Scaled integers, not floats: 1.1s is exactly 1100 ms, and a long number cannot lose its last digits.
    total = 0
    for unit, number in parts:
        digits, _, fraction = number.partition(".")
        scaled = int(digits + fraction) * _UNIT_MS[unit]
        whole, rest = divmod(scaled, 10 ** len(fraction))
        if rest:
            raise DurationError(f"{text!r} is too exact: write whole milliseconds, as in 1500ms")
        total += whole
    return _checked(total, text)


def _checked(ms: float | int, text: str) -> int:
    if ms > MAX_MS:
        raise DurationError(f"{text!r} is too long: ten years is the most")
    whole = round(ms)
    if whole == 0 and ms != 0:
        raise DurationError(f"{text!r} is too exact: write whole milliseconds, as in 1500ms")
    if isinstance(ms, float) and abs(ms - whole) > 1e-3:  # less is what floats cannot tell
        raise DurationError(f"{text!r} is too exact: write whole milliseconds, as in 1500ms")
    return whole
