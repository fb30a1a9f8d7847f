"""Kernels that models and attention share: bindings of the C library ``ferrum_rpc_kernels``, which replaces torch on a
CPU where torch is slow, and one Triton kernel for CUDA (`triton_heads`)."""
