"""Benchmarks: shotclock side by side with what a user would pick instead. Run with `make bench`."""
