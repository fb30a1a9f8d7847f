"""C for what torch does badly on a CPU, and nothing else. The sources are in
ferrum_rpc_kernels/, the callers on their floors."""
