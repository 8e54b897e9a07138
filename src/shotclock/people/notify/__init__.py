"""Notifications: who is told about the end of a run and about proposals, and how."""
