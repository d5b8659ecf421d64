"""Telling: what was planned and measured, as data, text and pages. Computes nothing and knows nothing of memplan."""
