"""Any decoder of `transformers` over our cache: its layers are its own, attention is ours.

``describe`` finds out what a configuration is, without weights, and refuses what would be wrong; ``model`` reads the
weights and runs it; ``attention`` is where a layer calls us; ``rope`` keeps a row from depending on its neighbours.
`transformers` takes seconds to import: nothing outside of this package imports it, and this package where it is needed.
"""
