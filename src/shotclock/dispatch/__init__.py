"""What a call of an App declares beyond its clocks: approval, keys, limits, jobs, and where the App is found."""

from __future__ import annotations

from ..runtime import light_asyncio as light_asyncio  # before a module of ours imports asyncio
