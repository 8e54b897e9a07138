"""The core is pure: what is measured here is truth, never time."""

from hypothesis import settings

# Other tests, and other people, share these cores: how long one example took says nothing about the code.
settings.register_profile("shotclock", deadline=None, max_examples=60)
settings.load_profile("shotclock")
