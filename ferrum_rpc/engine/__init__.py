"""The engine: one model thread, the queue in front of it, and the runner that turns a step into rows.

Submodules are imported by name, so that the service floor can use the thread without importing torch.
"""
