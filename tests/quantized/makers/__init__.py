"""One file for each library; see `tests.quantized.make`."""
