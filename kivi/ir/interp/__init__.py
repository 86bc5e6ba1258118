"""Interpreters, one a dialect, in NumPy: the living definition of what each operation means."""
