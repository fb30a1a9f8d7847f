"""Programs that run in a peer's own Python environment, and import nothing of ours but each other."""
