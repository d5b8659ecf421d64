"""For all tests: no example of a property has a time limit, since other work may run beside it; Keras runs on jax."""

import os

from hypothesis import settings

os.environ["KERAS_BACKEND"] = "jax"

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
