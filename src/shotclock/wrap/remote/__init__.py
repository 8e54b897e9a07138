"""`wrap --url`: the process that passes messages on to a server over HTTP."""
