"""The chokepoint and the ways of stopping work. Only this room spawns, signals, kills and reads the time."""
