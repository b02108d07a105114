"""The base of every family: registration, launching, checks, devices."""
