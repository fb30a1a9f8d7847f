"""Any decoder of `transformers` over our cache: transformers runs the layers, and our backends the attention.

``describe`` reads a configuration without weights, and refuses what would be computed wrong; ``model`` reads the
weights and runs it; ``attention`` connects a layer to our attention; ``rope`` makes rotations independent of a row's
neighbours. `transformers` takes seconds to import: only this package imports it, when it is needed.
"""
