"""Releases taken to devices."""
