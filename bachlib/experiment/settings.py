"""An experiment: one flat set of parameters from the raw log to the last picture. The files of `params/` hold them.

Everything is checked before anything runs: unknown keys, wrong types, incompatible values.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_serializer, model_validator

from bachlib import BachError
from bachlib.data.sources import SOURCES
from bachlib.evaluate.evaluation import cannot_serve
from bachlib.files import project_root
from bachlib.model.methods import METHODS, NO_ELBO, unfit
from bachlib.params import ModelParams, Params, PrepareParams, Seed, ServeBy, TrainParams, WorldParams, validated
from bachlib.reading import YAML_BYTES, from_yaml

CHAIN = ["03_data", "04_train", "05_evaluate", "06_heads_and_pi", "07_serving"]
NAME = r"^\w[\w.-]{0,99}$"  # of folders
FUNCTION = r"[^\W\d][\w.]{0,199}:[^\W\d]\w{0,99}"  # of a module
PARTS = ("encoder", "gate", "item_tower")  # of a model that may be of one's own, see `own`
SINGLE = "single"  # the notebook of one training, which a sweep runs for each of its points


class Experiment(TrainParams, ModelParams, PrepareParams, WorldParams):
    """Every parameter under one name. Where two parts use the same name: `seed` belongs to weights and training,
    `data_seed` to the draw of users and the planted world; `d` and `width` belong to the model, `world_d` and
    `world_width` to the planted world."""

    name: str = Field("mine", pattern=NAME, description="the name of the folders of results")
    notebooks: list[str] = Field(
        CHAIN, min_length=1, description="the notebooks that `bach run` executes, in this order"
    )
    source: str = Field("planted", description="the kind of log")
    path: str | None = Field(None, description="path of the log; None: look in BACH_DATA_DIR, then download it")
    data_seed: Seed = Field(0, description="random seed of the draw of users and of the planted world")
    world_d: int = Field(WorldParams.model_fields["d"].default, ge=2, description="dimension of the planted sphere")
    world_width: float = Field(WorldParams.model_fields["width"].default, ge=0.01, lt=1.5,
                               description="typical angle (radians) of a planted item to its interest")  # fmt: skip
    method: str = Field("p-bach", description="the method that the notebook `single` trains")
    encoder: str | None = Field(None, description="an encoder of your own, as package.module:function")
    gate: str | None = Field(None, description="a gating tower of your own, in the same way")
    item_tower: str | None = Field(None, description="an item tower of your own, in the same way")
    seeds: int = Field(1, ge=1, description="number of trainings of each method, with seed, seed + 1, …")
    prototypes: int = Field(
        16, ge=1, description="heads of the global codebook, in notebooks that also have a personal model"
    )
    serve_by: ServeBy = Field(
        "density", description="rule of serving at evaluation: mixture density (the paper), max, or softmax; BACH only"
    )
    max_eval: int = Field(10_000, ge=1, description="evaluate at most this many users")
    svd_rank: int = Field(64, ge=1, description="rank of PureSVD as a recommender, in 03_data")
    user: int = Field(7, ge=0, description="the user whose pictures are drawn")
    n_large: int = Field(40_000, ge=1_000, description="size of the catalogue on which 07_serving measures cost")

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("should not be true or false")
        return value

    @field_validator(*PARTS)
    @classmethod
    def _names_a_function(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(FUNCTION, value):
            raise ValueError("should be package.module:function")
        return value

    @model_serializer(mode="wrap")
    def _as_before_there_were_own_parts(self, serialize: Any) -> dict[str, Any]:
        """Without the parts that are not one's own: names and hashes of earlier runs stay what they are."""
        return {key: value for key, value in serialize(self).items() if key not in PARTS or value is not None}

    @property
    def prepare(self) -> dict[str, Any]:
        """What `data.prepare` takes."""
        return self._part(PrepareParams) | {"seed": self.data_seed}

    @property
    def world(self) -> dict[str, Any]:
        """What `data.planted.write_world` takes."""
        return self._part(WorldParams) | {"d": self.world_d, "width": self.world_width, "seed": self.data_seed}

    @property
    def model(self) -> dict[str, Any]:
        """What `model.methods.build` takes."""
        return self._part(ModelParams)

    @property
    def train(self) -> dict[str, Any]:
        """What `train.fit` takes."""
        return self._part(TrainParams)

    def _part(self, of: type[Params]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in of.model_fields}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for problem in _impossible(self):
            raise ValueError(problem)
        return self


def _impossible(p: Experiment) -> Iterator[str]:
    """Values that are not valid together."""
    if p.method not in METHODS:
        yield f"method: there is no {p.method!r}{nearest(p.method, METHODS)}; there are {', '.join(METHODS)}"
    else:
        for name in unfit(METHODS[p.method], p):
            yield f"{name}: method {p.method!r} {NO_ELBO}; got {getattr(p, name)!r}"
        if problem := cannot_serve(p.serve_by, METHODS[p.method].kernel, f"method {p.method!r}"):
            yield problem
        for part in unused(p.method):
            if getattr(p, part):
                yield f"{part}: method {p.method!r} has no {part.replace('_', ' ')}; got {getattr(p, part)!r}"
    if p.gate and p.pi != "gate":
        yield f"gate: pi={p.pi!r} has no gating tower; use pi: gate"
    if p.source not in SOURCES:
        yield f"source: there is no {p.source!r}{nearest(p.source, SOURCES)}; there are {', '.join(SOURCES)}"
    elif SOURCES[p.source].own and p.path is None:
        yield f"path: source {p.source!r} needs the path of your log"
    if p.columns is not None and p.source not in ("csv", "parquet"):
        yield f"columns: source {p.source!r} has fixed columns; only csv and parquet take them"
    if p.items != "product" and p.source != "complete-journey":
        yield f"items: source {p.source!r} has no product types; only complete-journey has"
    if p.context != "none":
        yield f"context: {p.context!r} needs a context, which only Python code can give: dataset.with_context(array)"
    if (p.width or p.d) % p.attention_heads:
        yield f"attention_heads: should divide the width ({p.width or p.d}), got {p.attention_heads}"
    if p.d % p.sasrec_heads:
        yield f"sasrec_heads: should divide d ({p.d}), got {p.sasrec_heads}"
    if p.source == "planted" and p.d >= min(p.n_items, p.n_users):
        yield f"d: should be smaller than n_users ({p.n_users}) and n_items ({p.n_items}), got {p.d}"
    for name in p.notebooks if "notebooks" in p.model_fields_set else []:
        if name not in notebook_names():
            yield f"notebooks: there is no {name!r}{nearest(name, notebook_names())}"


def unused(method: str) -> tuple[str, ...]:
    """The parts that a method does not have."""
    row = METHODS[method]
    return PARTS if row.objective == "counts" else () if row.kernel else ("gate",)


def nearest(name: str, known: Any) -> str:
    """A hint for an error message: the most similar known name, if there is one."""
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file."""
    if not os.path.isfile(path):  # nor can it be: a name of a thousand letters
        there = ", ".join(sorted(p.name for p in path.parent.glob("*.yaml")))
        raise BachError(f"{path} does not exist; there are {there or 'none'}")
    with path.open("rb") as stream:
        values = from_yaml(stream.read(YAML_BYTES + 1), path)
    if not isinstance(values, dict):
        raise BachError(f"{path} should hold lines of `key: value` and holds {type(values).__name__}")
    return values


def experiment_of(values: dict[str, Any], where: str) -> Experiment:
    """Validated parameters; an error names the file, the key and the closest valid name."""
    return checked(Experiment, values, where)


P = TypeVar("P", bound=Params)


def checked(model: type[P], values: dict[str, Any], where: str) -> P:
    """`validated`; for an unknown key the error names the closest valid one."""
    if wrong := [str(key) for key in values if key not in model.model_fields]:
        told = [f"  {key}: not a parameter{nearest(key, model.model_fields)}" for key in wrong]
        raise BachError(f"{where}: wrong parameters\n" + "\n".join(told))
    return validated(model, values, where)


def read_experiment(
    path: str | Path, more: dict[str, Any] | None = None, overlays: Sequence[str | Path] = ()
) -> Experiment:
    """The experiment of a file, or of a name in `params/`. The overlays change it, in their order; `more` replaces
    values. A file can do the same with `base: [ml20m, letter]`: an experiment, then overlays."""
    values = {**_layered([path, *overlays]), **(more or {})}
    if more and isinstance(more.get("path"), str):
        values["path"] = log_at(more["path"], Path(path))
    return experiment_of(values, " + ".join(map(str, [params_file(path), *overlays])))


def params_file(name: str | Path, beside: Path | None = None) -> Path:
    """The file of a path (also beside another file), or of a name in `params/`."""
    path = Path(name)
    try:
        if beside and (beside.parent / path).is_file():
            return beside.parent / path
        return path if path.suffix or path.is_file() else project_root() / "params" / f"{path}.yaml"
    except OSError as error:  # a name of a thousand letters
        raise BachError(f"{name!s:.80} cannot be the name of a file: {error.strerror}") from None


def is_overlay(values: dict[str, Any]) -> bool:
    """Does a file only change other experiments?"""
    if (said := values.get("overlay", True)) is not True:
        raise BachError(f"overlay: should be true, or the line left out; got {said!r}")
    return "overlay" in values


def _layered(names: Sequence[str | Path], within: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of an experiment under overlays, named "ml20m-letter"."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            path = params_file(name, within[-1] if within else None)
            values = {"name": path.stem, **read_yaml(path)}
        except (BachError, TypeError) as error:
            raise BachError(f"{within[-1]}: base: {error}" if within else str(error)) from None
        base, overlay = values.pop("base", []), is_overlay(values)
        if not isinstance(base, str | list):
            raise BachError(f"{path}: base: should be a file or a list of files; got {base!r:.80}")
        if path.resolve() in within:
            raise BachError(f"{path}: base: the file is its own base")
        if overlay and (base or not found):
            why = "has no base of its own" if base else f"needs an experiment before it, e.g. [ml20m, {path.stem}]"
            raise BachError(f"{path} is an overlay (overlay: true): it {why}")
        if found and not overlay:
            raise BachError(f"{path} is an experiment: only overlays (files with overlay: true) can follow the first")
        if base:
            values = {**_layered([base] if isinstance(base, str) else base, (*within, path.resolve())), **values}
        if isinstance(values.get("path"), str):
            values["path"] = log_at(values["path"], path)
        values.pop("overlay", None)
        found |= values | {"name": f"{found['name']}-{values['name']}" if found else values["name"]}
    return found


def log_at(log: str, file: Path) -> str:
    """The absolute path of a log that a file names, relative to the working folder or to the file."""
    with suppress(OSError, RuntimeError, ValueError):  # no name of a file, or ~nobody
        for place in (Path(log).expanduser(), file.parent / log):
            if place.exists():
                return str(place.resolve())
    raise BachError(f"{file}: path: {log:.200} does not exist, neither here nor beside the file")


def given(words: list[str], known: Collection[str] | None = None) -> dict[str, Any]:
    """["k=4", "epochs=2"] → {"k": 4, "epochs": 2}: the values of `--set`. `known`: the names that are allowed."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise BachError(f"--set {word}: should be name=value")
        if known is not None and name not in known:
            raise BachError(f"--set {word}: {name!r} is not a parameter here{nearest(name, known)}")
        found[name] = from_yaml(value, f"--set {word:.80}: the value")
    return found


def notebook_folder() -> Path:
    return project_root() / "notebooks"


def notebook_names() -> list[str]:
    return sorted(path.stem for path in notebook_folder().glob("*.py"))
