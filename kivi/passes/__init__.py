"""Lowerings and rewrites, one a file."""
