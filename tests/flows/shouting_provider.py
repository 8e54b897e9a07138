"""A step type of somebody else: all that it needs is in this one file."""

from typing import Literal

from shotclock.calls.call import Call, Outcome
from shotclock.calls.runtime import Runtime
from shotclock.core.errors import Ending, Failure
from shotclock.core.validation import field
from shotclock.flows.steps.provider import StepCall, StepPart, StepResult, StepType


class ShoutStep(StepPart):
    type: Literal["shout"]
    word: str = field(min_length=1, keys=("word", "text"))


SHOUT = StepType(
    "shout",
    "a word, louder",
    ShoutStep,
    lambda services: ShoutProvider(),
    default_ms=2_000,
    unit="ms",
    rules={"STEP_INVALID": "unpronounceable"},
)
STEP_TYPES = (SHOUT,)


class ShoutProvider:
    step_type = SHOUT

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        word = step.settings["word"]
        if not word.isalpha():
            raise Failure("STEP_INVALID", f"{word!r} cannot be shouted")
        return StepResult(Outcome(Ending.FINISHED, data={"loud": word.upper()}), word.upper())

    async def close(self) -> None:
        pass
