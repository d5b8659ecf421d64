"""Tests that use OR-tools: collected in a process of their own only."""

from __future__ import annotations

from tests.apart import IGNORED

collect_ignore_glob = IGNORED
