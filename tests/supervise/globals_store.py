"""Another module of the program in `globals_program`."""

KEPT: list[str] = []
LIMITS = {"a": 1}


def remember(item: str) -> None:
    KEPT.append(item)
