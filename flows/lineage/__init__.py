"""Lineage: read, walked, shown."""
