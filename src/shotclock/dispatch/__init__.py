"""Stages of an App's calls: approval, keys, limits, jobs, and the place of the App."""

from __future__ import annotations

from ..runtime import light_asyncio as light_asyncio  # before a module of ours imports asyncio
