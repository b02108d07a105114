"""Launch choice: measured rows, one rule file a family, and `pick`."""
