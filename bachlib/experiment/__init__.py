"""Experiments: settings from the raw log to the last picture, their stages, notebooks in batch, sweeps."""
