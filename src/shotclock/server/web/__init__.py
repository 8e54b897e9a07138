"""For people: the page on which proposals are decided, the HTTP API below it, and the door that all requests pass.

request ── door: Host, Origin, who asks, how often, how much ──┬── page
                                                               ├── API ── inbox
                                                               └── MCP
"""
