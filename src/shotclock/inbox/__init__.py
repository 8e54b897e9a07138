"""The inbox: an agent proposes, a person decides, and whoever waits for it is bounded either way."""
