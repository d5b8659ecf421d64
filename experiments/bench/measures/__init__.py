"""Measures: functions of a case that return what was found."""
