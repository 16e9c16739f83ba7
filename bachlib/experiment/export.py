"""`bach export`: a trained model as files that other tools read.

items.parquet        raw_id, item (number), title, genres, vector; x and y of the map; neighbors: numbers and distances
users.parquet        raw_id, user (number), heads, pi, kappa after the user's whole sequence, the test items included
user_side.onnx       history → heads, log π_u, κ; user_side.pt2 is the same for torch.export
item_tower.onnx      PureSVD rows of new items → vectors; item_tower.pt2
model.json           the rule and the formula of the score, sizes, checksums of the files, versions

x and y need the extra `lab` (UMAP); without it these two columns are missing, which is said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from bachlib import BachError, MissingExtra, needs
from bachlib.data import Dataset
from bachlib.files import file_hash, read_json, versions, whole_folder, write_json
from bachlib.model.twotower import TwoTower
from bachlib.serve import programs
from bachlib.serve.nearest import nearest
from bachlib.train.run import Run, data_of, find_run, read_about

FORMAT = "bachlib export 1"
NEIGHBORS, USERS = 10, 1024  # nearest items of each item; users that are encoded at a time
LOG_C = {
    "power-spherical": "gammaln(d - 1 + kappa) - gammaln((d - 1) / 2 + kappa) - (d - 1 + kappa) * log(2)"
    " - (d - 1) / 2 * log(pi)",
    "von-mises-fisher": "gammaln(d / 2) - log(2) - d / 2 * log(pi) - log(hyp0f1(d / 2, kappa**2 / 4))",
}
SCORE = {  # as Python, with the functions of numpy and scipy.special
    "power-spherical": "log(sum(exp(log_pi[r] + log_C(kappa[r]) + kappa[r] * log1p(heads[r] @ vector)) "
    "for r in range(k)))",
    "von-mises-fisher": "log(sum(exp(log_pi[r] + log_C(kappa[r]) + kappa[r] * heads[r] @ vector) for r in range(k)))",
    "max over heads": "max(heads[r] @ vector for r in range(k))",
}


def opened(name: str | Path, data: str | Path | None = None) -> Run:
    """A run by its folder or name, with its data set."""
    folder = find_run(name)
    method = read_about(folder)["identity"]["model"].get("method")
    if method != "mostpop" and not (folder / "best.safetensors").exists():
        raise BachError(
            f"{folder} has no weights (best.safetensors), which the first validation writes: train it first"
        )
    return Run.load(folder, data_of(folder, data))


def export(
    run: Run, out: str | Path, *, opset: int = programs.OPSETS[0], layout: bool = True, force: bool = False
) -> Path:
    """Write the folder `out`. `layout`: with the map, which takes a minute. `force`: replace an earlier export."""
    out, model, dataset = Path(out), run.model.eval(), run.dataset
    if not isinstance(model, TwoTower):
        raise BachError(f"{run.folder.name} has no vectors, only counts: any other method than mostpop can be exported")
    if dataset is None:
        raise BachError(f"{run.folder.name} was loaded without its data set: use Run.load(folder, dataset)")
    programs.check_opset(opset)
    if out.exists():
        _check_replaceable(out, force)
    parts = [part for part in (programs.user_side(model), programs.item_tower(model)) if part]
    with whole_folder(out) as new, torch.no_grad():
        off = {part.name: programs.write(part, new, opset) for part in parts}
        placed = _items(model, dataset, new / "items.parquet", layout)
        _users(model, dataset, new / "users.parquet")
        files = {path.name: {"bytes": path.stat().st_size, "sha256": file_hash(path)} for path in sorted(new.iterdir())}
        about = _about(run, opset, off) | {"map": placed, "files": files, "versions": versions()}
        write_json(new / "model.json", about, sort_keys=False, checked=True)
    return out


def _check_replaceable(out: Path, force: bool) -> None:
    own = read_json(out / "model.json").get("format") == FORMAT if out.is_dir() else False
    if not own and not (out.is_dir() and not any(out.iterdir())):
        raise BachError(f"{out} exists and is not an export; it is not replaced: choose another folder")
    if own and not force:
        raise BachError(f"{out} holds an export already: choose another folder, or replace it with --force")


def _about(run: Run, opset: int, off: dict[str, float]) -> dict[str, Any]:
    model, rule = run.model, run.model.kernel.name if run.model.kernel else "max over heads"
    return {
        "format": FORMAT,
        "run": run.folder.name,
        "method": model.config.get("name", model.config["method"]),
        "data": run.dataset.identity,
        "items": run.dataset.n_items,
        "users": run.dataset.n_users,
        **{name: getattr(model, name) for name in ("d", "k", "tau", "n_hist")},
        "kernel": model.kernel and model.kernel.name,
        "rule": rule,
        "score": SCORE[rule],
        "log_C": LOG_C.get(rule),
        "history": f"int64 (B, n): item numbers, the oldest first, -1 pads on the left, n from 1 to {model.n_hist}. "
        f"The caller cuts longer histories to the last {model.n_hist}; an empty one is a row of -1.",
        "users.parquet": "heads, pi and kappa after the whole sequence of each user, the test items included",
        "opset": opset,
        "difference": off,
    }


def _items(model: TwoTower, dataset: Dataset, path: Path, layout: bool) -> bool:
    """Returns whether the table has the map."""
    vectors = model.items().cpu().numpy()
    near, distance = nearest(vectors, vectors[:0], min(NEIGHBORS + 1, len(vectors)))
    width = near.shape[1] - 1
    places = _places(vectors) if layout else {}
    columns = {
        "raw_id": pa.array(dataset.items["raw_id"]),
        "item": pa.array(np.arange(len(vectors))),
        "title": pa.array(dataset.titles),
        "genres": pa.array([list(own) for own in dataset.items["genres"]], pa.list_(pa.string())),
        "vector": pa.FixedSizeListArray.from_arrays(vectors.ravel(), model.d),
        **places,
        "neighbors": pa.StructArray.from_arrays(
            [pa.FixedSizeListArray.from_arrays(of[:, 1:].ravel(), width) for of in (near, distance)],
            ["ids", "distances"],
        ),
    }
    pq.write_table(pa.table(columns), path, write_page_checksum=True)
    return bool(places)


def _places(vectors: np.ndarray) -> dict[str, np.ndarray]:
    """x and y of the map; nothing if UMAP is not installed."""
    try:
        needs("the map of an export", "lab", "umap")
        from bachlib.show.maps import layout
    except MissingExtra as error:
        print(f"{error}; items.parquet has no x and y")
        return {}
    return dict(zip("xy", layout(vectors, vectors[:0])[0].T, strict=True))


def _users(model: TwoTower, dataset: Dataset, path: Path) -> None:
    number = pa.list_(pa.float32())
    heads = pa.list_(pa.list_(pa.float32(), model.d))
    raw_ids = pa.array(dataset.users["raw_id"])
    schema = pa.schema({"raw_id": raw_ids.type, "user": pa.int64(), "heads": heads, "pi": number, "kappa": number})
    rows = model.token_rows()
    with pq.ParquetWriter(path, schema, write_page_checksum=True) as file:
        for first in range(0, dataset.n_users, USERS):
            users = np.arange(first, min(first + USERS, dataset.n_users))
            history = dataset.items_before(users, dataset.lengths[users], model.n_hist)
            u, log_pi, kappa = (x.cpu() for x in model.encode(history, rows=rows))
            of_user = pa.array(np.arange(len(users) + 1) * model.k, pa.int32())
            vectors = pa.FixedSizeListArray.from_arrays(u.flatten().numpy(), model.d)
            columns = [
                raw_ids[first : first + len(users)],
                pa.array(users),
                pa.ListArray.from_arrays(of_user, vectors),
                *(pa.ListArray.from_arrays(of_user, x.flatten().numpy()) for x in (log_pi.exp(), kappa)),
            ]
            file.write_table(pa.table(columns, schema=schema))
