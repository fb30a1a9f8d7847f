"""From rows of logits to answers, on the device. Sequences are not known here."""
