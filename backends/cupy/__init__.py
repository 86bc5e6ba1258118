"""Generated CUDA C: on a GPU through CuPy, and unmodified on a CPU under a shim."""
