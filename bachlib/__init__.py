"""BACH, a Bayesian Admixture of Contrastive Heads: the package under the workbook's notebooks.

The way of the data: `data` → `model` → (`train` → `evaluate` → `serve`) → `show`; a module imports only from
stages to its left.
"""

__version__ = "0.1.0"


class BachError(Exception):
    """Something a user can mend: the message says what was wrong, where, and what would be right."""


class NotFinite(BachError):
    """A number that should be finite is not: in training this is divergence."""
