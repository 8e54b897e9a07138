"""Servers: an App's commands for clients that speak MCP. This process runs none of the app's code."""

from __future__ import annotations

from ...core.lazy_names import import_lazily

# Before any part of the SDK: its client and framework, which a server does not use, are a fifth of its import.
import_lazily("mcp")
import_lazily("mcp.server")
