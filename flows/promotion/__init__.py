"""Promotion, approval, rollback."""
