"""How good a model is, and what its heads do."""
