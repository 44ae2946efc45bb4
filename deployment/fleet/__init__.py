"""Bundles to devices over OpenSSH: plan, transfer, activation, books, field rows."""
