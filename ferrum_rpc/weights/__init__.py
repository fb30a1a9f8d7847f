"""Checkpoints on disk: which tensors exist, and how they are streamed into memory. This package does not know
models."""
