"""Prompts, tools and demonstrations; the one prompt renderer."""
