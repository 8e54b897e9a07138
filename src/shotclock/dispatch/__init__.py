"""Stages of an App's calls: approval, keys, limits, jobs, and the place of the App."""
