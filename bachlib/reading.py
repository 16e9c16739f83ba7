"""Files that somebody else may have written or a disk may have damaged (YAML, arrays, tables, values in JSON), and ids
that a person has typed.

Nothing in a file runs, sizes are bounded before they are believed, and a damaged file is a BachError that names it.
"""

from __future__ import annotations

import copy
import errno
import re
import zipfile
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml

from bachlib import BachError

if TYPE_CHECKING:
    import pandas as pd

YAML_BYTES, YAML_DEPTH, YAML_VALUES, YAML_DIGITS = 1 << 18, 40, 20_000, 100  # the largest that is read
CELLS = 1 << 28  # of a table that has to fit into memory


@contextmanager
def reading(path: Path, advice: str = "") -> Iterator[None]:
    """Whatever goes wrong inside the block is told as damage of this file; errors of the disk stay what they are."""
    try:
        yield
    except FileNotFoundError:
        raise BachError(f"{path} is missing{advice and f'; {advice}'}") from None
    except Exception as error:  # readers of damaged files raise errors of every kind
        if isinstance(error, BachError) or getattr(error, "errno", None) not in (None, errno.EINVAL):
            raise
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise BachError(f"{path} is damaged ({told:.200}){advice and f'; {advice}'}") from None


def expect(value: Any, form: Any, name: str = "the file") -> None:
    """Raise a ValueError unless a value has this form: a type, a choice of types, or a dictionary with such entries."""
    if not isinstance(value, dict if isinstance(form, dict) else form) or (type(value) is bool and form is not bool):
        raise ValueError(f"{name} is {type(value).__name__}")
    for key, of in form.items() if isinstance(form, dict) else ():
        if key not in value:
            raise ValueError(f"{name} has no {key!r}")
        expect(value[key], of, key)


def plain_name(name: Any) -> str:
    """A name from a file that becomes a part of a path: it must not lead anywhere else."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w][\w. +-]{0,200}", name):
        raise ValueError(f"{name!r:.80} is not the name of a file or folder")
    return name


def read_array(path: Path, mode: Literal["r", "c"] = "r") -> np.ndarray:
    """A memory-mapped .npy file of plain numbers, no longer and no shorter than its header says."""
    with reading(path), np.errstate(over="ignore"):  # of a size beyond 2^63
        array = np.load(path, mmap_mode=mode, allow_pickle=False)
        if (there := path.stat().st_size - array.offset) != array.nbytes:
            raise ValueError(f"its header promises {array.nbytes:,} bytes, there are {there:,}")
        return array


def read_arrays(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """These arrays of an .npz file that `np.savez` wrote, which does not compress."""
    with reading(path):
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
                raise ValueError("its arrays are said to be larger than the file")
            if damaged := archive.testzip():  # numpy stops before the checksum if a header names a smaller array
                raise ValueError(f"the checksum of {damaged} is another")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}


def read_table(path: Path, advice: str = "") -> pd.DataFrame:
    """A Parquet file of ours; a damaged page is noticed if the file has checksums."""
    import pyarrow.parquet as pq  # late, as pandas is: a process that only serves starts without them

    with reading(path, advice), pq.ParquetFile(path, page_checksum_verification=True) as file:
        if (cells := file.metadata.num_rows * file.metadata.num_columns) > CELLS:
            raise ValueError(f"it claims {cells:,} values")
        return file.read().to_pandas()


def plain(given: Any) -> list:
    """A list of Python's own numbers and texts, from an array, a tensor, a pandas column or a list."""
    return [raw.item() if isinstance(raw, np.generic) else raw for raw in getattr(given, "tolist", given.__iter__)()]


def numbers_of(name: str, given: Any, number: Mapping[Any, int]) -> np.ndarray:
    """Item numbers (m,) of ids of the log; an error names the unknown ones and what they may be meant to be."""
    given = plain(given)
    try:
        unknown = [raw for raw in given if isinstance(raw, bool) or raw not in number]
    except TypeError:  # a list in a list
        raise BachError(f"{name} should be a list of ids of the log; got {given!r:.60}") from None
    if unknown:
        told = ", ".join(f"{raw!r} (the nearest is {_nearest(raw, number)!r})" for raw in unknown[:5])
        more = f" and {len(unknown) - 5:,} more" if len(unknown) > 5 else ""
        raise BachError(f"{name}: the log has no item {told}{more}")
    return np.array([number[raw] for raw in given], np.int64)


def _nearest(raw: Any, number: Mapping[Any, int]) -> Any:
    spelt, numbers = {str(known): known for known in number}, (int, float)
    if str(raw) in spelt:  # a number for a text, or a text for a number
        return spelt[str(raw)]
    if isinstance(raw, numbers) and raw == raw and all(isinstance(known, numbers) for known in number):
        return min(number, key=lambda known: abs(known - raw))
    return spelt[get_close_matches(str(raw), [*spelt][:50_000], 1, 0)[0]]


def from_yaml(text: str | bytes, where: Any) -> Any:
    """The value of a YAML text: no objects, no key twice, and no more values, levels or digits than anybody writes."""
    try:
        if len(text) > YAML_BYTES:
            raise ValueError(f"more than {YAML_BYTES:,} characters")
        return copy.deepcopy(_parsed(text))
    except Exception as error:  # PyYAML's own, and whatever Python says of a date or a number
        raise BachError(f"{where} is not YAML that can be read: {f'{error}'[:400]}") from None


@lru_cache(maxsize=64)
def _parsed(text: str | bytes) -> Any:
    """Each text once: a sweep reads the file of its experiment for each of its points."""
    return yaml.load(text, _Careful)


class _Careful(yaml.SafeLoader):
    """Plain YAML silently takes the last of two equal keys; here that is an error.

    An alias counts with all values it stands for: nine lists of nine aliases each would be a billion values.
    """

    depth = values = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        begins, before = self.peek_event(), self.values
        self.depth += 1
        if self.depth > YAML_DEPTH:
            self._refuse(f"more than {YAML_DEPTH} levels", begins)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(begins, yaml.AliasEvent) and not hasattr(node, "values"):
            self._refuse("an alias inside of what it stands for", begins)
        self.values += getattr(node, "values", 1)
        node.values = self.values - before
        if self.values > YAML_VALUES:
            self._refuse(f"more than {YAML_VALUES:,} values", begins)
        numeric = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if numeric and len(node.value) > YAML_DIGITS:
            self._refuse(f"a number of more than {YAML_DIGITS} digits", begins)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if (said := str(key.value)) in seen:
                self._refuse(f"{said!r:.80} is there twice", key)
            seen.add(said)
        return super().construct_mapping(node, deep)

    def _refuse(self, why: str, at: yaml.Node | yaml.Event) -> None:
        raise yaml.constructor.ConstructorError(None, None, why, at.start_mark)
