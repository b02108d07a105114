"""What every family stands on: registration, launching, checks, devices."""
