"""Seconds of training steps that others have published, beside those that memplan predicts."""
