"""Durable state in one SQLite file. Plain typed values go in and out; no SQL leaves this package."""
