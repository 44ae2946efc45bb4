"""Rollout engines behind one protocol, and the one turn-and-tool loop."""
