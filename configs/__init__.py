"""What can be set (``configs.schema``) beside what is set (the YAML profiles)."""
