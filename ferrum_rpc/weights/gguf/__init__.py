"""GGUF, llama.cpp's format: one file with metadata and tensors, the matrices in blocks of a few bits.

Metadata are converted to the keys of a ``config.json``, tensors get the names of Hugging Face's format, so no other
code depends on the format. The header is read here, within bounds and without allocating what it claims; the ``gguf``
package dequantizes blocks.
"""
