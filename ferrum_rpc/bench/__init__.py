"""`ferrum-rpc bench`: measures a running executor from a remote scheduler's side of the wire.

It is an ordinary client: it knows the contract and nothing of the server's internals, so it can measure an executor on
another machine. ``benchmarks/`` compares with other engines and with the same model in process.
"""
