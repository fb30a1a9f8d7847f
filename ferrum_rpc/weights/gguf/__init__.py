"""GGUF, llama.cpp's format: one file with metadata and tensors, the matrices in blocks of a few bits.

Metadata become the keys that a ``config.json`` has, tensors get the names of Hugging Face's format: above, nothing
knows where a model came from. The header is read here, within bounds and without allocating what it claims; blocks
become numbers by the ``gguf`` package.
"""
