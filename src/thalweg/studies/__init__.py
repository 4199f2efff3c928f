"""Reproductions of published results; no other package imports them."""
