"""A model on several ranks: what they say to each other in the middle of a step."""
