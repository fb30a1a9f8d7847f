"""Programs that make and check what the repository commits: stubs, transcript, demo, demo model."""
