"""The reference backend: plain NumPy."""
