"""Secret parameters: `token: Secret[str]` takes its value from an environment variable, and is no argument.

So it is in no schema, command line, approval, key or store. `Redaction` removes the value from answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Secret as Secret
from pydantic import TypeAdapter, ValidationError

from ..core.catalogue import SecretParameter
from ..core.errors import Failure
from ..core.signatures import declare, read_signature
from ..core.value_types import JsonObject
from ._command_function import around


def supply_secrets(
    function: Callable[..., Any], secrets: tuple[SecretParameter, ...], environment: Mapping[str, str]
) -> Callable[..., Any]:
    """Return the function without its secret parameters. At each call they are read from the environment."""
    written = read_signature(function)
    adapters = {secret.name: TypeAdapter(written.parameters[secret.name].annotation) for secret in secrets}

    def values() -> JsonObject:
        found = {}
        for secret in secrets:
            text = environment.get(secret.variable, "")
            if text:
                try:
                    found[secret.name] = adapters[secret.name].validate_python(text)
                except ValidationError as error:
                    reason = error.errors(include_url=False, include_input=False, include_context=False)[0]["msg"]
                    raise Failure("ARGUMENT_REFUSED", f"{secret.variable}: {reason}") from None
            elif secret.is_required:
                raise Failure("ARGUMENT_REFUSED", f"{secret.name}: set {secret.variable} in the environment")
        return found

    run = around(function, supply=values)
    kept = [parameter for name, parameter in written.parameters.items() if name not in adapters]
    declare(run, written.replace(parameters=kept))
    return run
