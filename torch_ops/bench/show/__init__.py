"""Tables and charts of records."""
