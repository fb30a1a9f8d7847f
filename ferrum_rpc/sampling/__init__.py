"""What becomes of a row of logits on the device. Knows rows, not sequences."""
