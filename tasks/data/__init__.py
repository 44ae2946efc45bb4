"""Data prep: sources, canonical rows, leaks, bands."""
