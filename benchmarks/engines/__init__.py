"""An adapter for each engine: it takes the tokens of a cell and hands over the rows of its last step."""
