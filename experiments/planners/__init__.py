"""Planners measured on published and generated graphs."""
