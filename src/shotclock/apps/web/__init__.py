"""The page on which people decide proposals, the HTTP API below it, and the middleware that all requests pass.

request ── auth: Host, Origin, who asks, how often, how much ──┬── page
                                                               ├── API ── inbox
                                                               └── MCP
"""
