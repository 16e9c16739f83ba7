"""Vectors of items that came after training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from bachlib import BachError
from bachlib.model.twotower import TwoTower
from bachlib.serve.catalogue import Catalogue, as_numbers
from bachlib.serve.users import float32


def embedded(model: TwoTower, rows: Any, vectors: Any) -> tuple[Float[np.ndarray, "m d"], Float[np.ndarray, "m d"]]:
    """(vectors, what histories are read from) of new items, from rows for the item tower or from finished vectors."""
    if (rows is None) == (vectors is None):
        raise BachError("give either rows, for the item tower, or vectors")
    if rows is None and model.history == "frozen":
        raise BachError("this model reads histories from frozen rows: give rows, not vectors")
    if rows is not None:
        if not hasattr(model.item_tower, "embed"):
            raise BachError("this item tower has no `embed`: give vectors")
        rows = as_numbers("rows", rows)
        if rows.shape[1] != model.d:
            raise BachError(f"rows should be (n, {model.d}), as the item table's are; got {rows.shape}")
        with torch.no_grad():
            made = model.item_tower.embed(torch.from_numpy(rows).to(model.device))
            vectors = float32(torch.nn.functional.normalize(made, dim=-1))
    vectors = Catalogue.of(vectors).vectors
    if vectors.shape[1] != model.d:
        raise BachError(f"new items should have {model.d} dimensions; got {vectors.shape[1]}")
    return vectors, rows if model.history == "frozen" else vectors
