"""The inbox: agents propose, operators decide, and every wait is bounded."""
