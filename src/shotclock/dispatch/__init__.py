"""What a call of an App declares beyond its clocks: approval, keys, limits, jobs, and where the App is found."""
