"""The wire contract, version 1: generated from protos/ by `make stubs`."""
