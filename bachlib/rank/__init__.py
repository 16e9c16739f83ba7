"""Ranks over the full catalogue, and the metrics made of them."""
