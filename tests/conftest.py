"""For all tests: no example of a property has a time limit, since other work may run beside it."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
