"""The KV floor: who owns which block (integers) and the tensors behind them (`kv.store`).

`kv.manager.KvManager` is the door. Importing this package imports no torch; only `kv.store` does.
"""
