"""Commands that let pools of processes work, with functions and classes of the program's own file."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from shotclock import App

app = App("pooled", help="Work in pools.")


class Square:
    def __init__(self, value: int) -> None:
        self.value = value


def square(n: int) -> Square:
    return Square(n * n)


def add_squares(n: int, method: str) -> int:
    context: Any = multiprocessing.get_context(None if method == "default" else method)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        return sum(each.value for each in pool.map(square, range(n)))


@app.command(mutates=False)
def in_process(n: int, method: str = "default") -> int:
    return add_squares(n, method)


@app.command(mutates=False, isolation="shared")
def in_shared(n: int, method: str = "default") -> int:
    return add_squares(n, method)


app()
