"""Servers: an App's commands for clients that speak MCP. The process that speaks runs none of the app's code."""
