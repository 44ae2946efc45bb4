"""The commands, and how they show things."""
