"""memplan's plans against `jax.checkpoint` and XLA's own rematerialization, on real training steps."""
