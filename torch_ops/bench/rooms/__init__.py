"""One room an op: its cases, peers and calls."""
