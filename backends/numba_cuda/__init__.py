"""Generated Numba CUDA kernels: on a GPU through numba-cuda, and on a CPU under a simulator."""
