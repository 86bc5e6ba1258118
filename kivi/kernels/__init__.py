"""What backends with generated kernels share: which kernel a step needs, how it is found or made, and with what it is launched."""
