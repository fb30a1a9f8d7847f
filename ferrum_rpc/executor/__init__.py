"""The executor service's contract, by version."""
