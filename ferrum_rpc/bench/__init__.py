"""`ferrum-rpc bench`: what a running executor gives a remote scheduler, measured from the scheduler's side of the wire.

A client like any other: it knows the contract and nothing of the server's insides, so that it can be pointed at an
executor on another machine. Comparisons with other engines and with the same model in this process are the business of
``benchmarks/``.
"""
