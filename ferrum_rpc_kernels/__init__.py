"""Nothing but `kernels.so`, which `ferrum_rpc.native` loads."""
