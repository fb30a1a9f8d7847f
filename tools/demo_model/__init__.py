"""How the demo models in `ferrum_rpc/assets/` are made: corpus, byte tokenizer, training, evaluation, model card.

A development tool: nothing in `ferrum_rpc` imports it, and it imports nothing from there.
"""
