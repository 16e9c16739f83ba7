"""Measurements, as ratios in one process."""
