"""Measures: functions from a case to a measurement."""
