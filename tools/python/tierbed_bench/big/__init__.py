"""What grows when tables are larger than memory: a suite that measures it, phase by phase."""
