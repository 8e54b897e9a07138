"""A stdio server offered over streamable HTTP."""
