"""`shotclock wrap`: any MCP server over stdio behind limits, in front of a process that is really gone at the end."""
