"""How the demo models in `ferrum_rpc_demo/` are trained: the text, and one program.

A development tool: nothing in `ferrum_rpc` imports it, and it imports nothing from there. Configurations, tokenizer and
model cards are files of the assets; a training run replaces the weights and the figures of the card.
"""
