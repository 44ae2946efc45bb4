"""Merge, GGUF conversion, importance matrix, quantisation, parity."""
