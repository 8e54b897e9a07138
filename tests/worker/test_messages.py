"""Values of users in a process that runs none of their code: only plain values and our own records are unpickled."""

import collections
import datetime
import decimal
import fractions
import pickle
import uuid
from pathlib import Path

import pytest

from shotclock.core.errors import Failure
from shotclock.core.limits import ClockKind, Clocks
from shotclock.worker.messages import keep_users_code_out, unpickle

PLAIN = [
    {"list": [1, 2.5, None, b"bytes"], "complex": 1j},
    {range(3), frozenset((1,))},
    collections.OrderedDict(a=collections.Counter("aab"), b=collections.deque([1])),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
    [decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.uuid4()],
    [Clocks.of("1s"), ClockKind.IDLE],
]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_and_our_own_records_are_unpickled(protocol: int) -> None:
    with keep_users_code_out():
        if protocol >= 4:  # what workers use
            assert [unpickle(pickle.dumps(value, protocol)) for value in PLAIN] == PLAIN
            assert unpickle(pickle.dumps(Failure("TIMEOUT", "late"), protocol)).code == "TIMEOUT"
        assert unpickle(pickle.dumps({"a": [1, "b"]}, protocol)) == {"a": [1, "b"]}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_classes_of_users_are_refused_in_every_protocol(protocol: int) -> None:
    with keep_users_code_out(), pytest.raises(pickle.UnpicklingError, match="not imported here"):
        unpickle(pickle.dumps(Path("a"), protocol))


@pytest.mark.parametrize(
    "name", ["uuid os.system", "uuid os", "uuid getnode", "shotclock.core.value_types sys.exit", "builtins eval"]
)
def test_names_that_an_allowed_module_only_imports_are_refused(name: str) -> None:
    module, attribute = (bytes((0x8C, len(part))) + part.encode() for part in name.split())
    with keep_users_code_out(), pytest.raises(pickle.UnpicklingError, match="not imported here"):
        unpickle(b"\x80\x04" + module + attribute + b"\x93.")
