"""Parity and quantising on request."""
