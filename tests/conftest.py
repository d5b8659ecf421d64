"""For all tests: no example of a property has a time limit, since other work may run beside it; no plan is kept."""

import os

from hypothesis import settings

os.environ["MEMPLAN_CACHE"] = "off"  # a test that wants kept plans names a folder of its own

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
