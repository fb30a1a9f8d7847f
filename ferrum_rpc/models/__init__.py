"""Models: token ids and positions in, logits out. Where K and V live is not known here."""
