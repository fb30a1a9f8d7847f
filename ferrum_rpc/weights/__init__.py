"""Checkpoints on disk: which tensors there are and how they stream into memory. Models are not known here."""
