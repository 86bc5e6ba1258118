"""The CPU backend: kernels generated from the `vec` dialect, compiled by LLVM, on NumPy arrays and torch tensors in host memory."""
