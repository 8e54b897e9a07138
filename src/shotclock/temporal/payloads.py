"""What of a run lies in Temporal's history, and what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from temporalio.converter import DataConverter


def make_converter() -> DataConverter:
    from temporalio.converter import DataConverter

    return DataConverter.default
