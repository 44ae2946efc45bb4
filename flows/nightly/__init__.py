"""Nights of the schedule."""
