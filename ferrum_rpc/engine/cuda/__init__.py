"""What only a GPU has: a step's integers in one copy, recorded graphs, and a step begun while another is computed."""
