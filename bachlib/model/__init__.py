"""Towers, the mixture and its objective."""
