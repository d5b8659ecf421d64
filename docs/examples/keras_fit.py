"""Keras 3 on jax: `memplan.keras.plan` between `compile` and `fit`."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import keras
import numpy as np

import memplan

keras.utils.set_random_seed(0)
x = np.random.normal(size=(4096, 2)).astype("float32")
y = np.sin(3 * x).sum(1, keepdims=True)

layers = [keras.layers.Dense(32, activation="tanh") for _ in range(6)]
model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dropout(0.1), keras.layers.Dense(1)])
model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss="mse", metrics=["mae"])
planned = memplan.keras.plan(model, budget="2900KiB")  # was: nothing
history = model.fit(x, y, batch_size=4096, epochs=5, verbose=0)
losses = history.history["loss"]
