"""Bindings of the C library ``ferrum_rpc_kernels``, which replaces torch on a CPU where torch is slow."""
