"""Flows and the command line: order, gates, promotion; no real work."""
