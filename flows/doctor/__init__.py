"""What doctor and check look at."""
