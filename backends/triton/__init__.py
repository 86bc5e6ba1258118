"""The Triton backend: kernels generated from the `tile` dialect, on NVIDIA and AMD GPUs, or under Triton's interpreter."""
