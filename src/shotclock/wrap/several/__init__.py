"""Several servers as one: `shotclock wrap --config`."""
