"""Random damage to a file, and how two results are compared: parts of the fuzzers."""

import json
import random
import re
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml

NUMBERS = """0 -1 1 -0.0 0.5 1e-320 1e309 -1e309 nan NaN inf Infinity 127 128 65536 2147483647 2147483648 -2147483649
9007199254740993 9223372036854775807 9223372036854775808 18446744073709551616 1_000 0x10 1e5 00012 +7""".split()
NUMBERS += ["9" * 400, "9" * 6000, "", " 5", "5 ", "٣", "1,5"]
PIECES = [
    b"\0",
    b"\n",
    b"\r\n",
    b"\r",
    b'"',
    b"'",
    b",",
    b"::",
    b"\xff",
    b"\xef\xbb\xbf",
    b"{",
    b"[",
    b"]",
    b"- ",
    b": ",
]
PIECES += [
    b"&a ",
    b"*a",
    b"!!python/object/apply:os.system [ls]",
    b"null",
    b"\xe2\x80\xae",
    b"../../x",
    b"\t",
    b"#",
    b"-",
]
PIECES += [b"[" * 5000, b"a" * 70_000, b'{"a":' * 5000, b"\x80\x04cos\nsystem\n", "é".encode("latin-1"), b"\xc2\x85"]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**31,
    2**63,
    2**64,
    10**30,
    1e308,
    "",
    "x",
    "../../etc",
    "\0",
    "é",
    [],
    {},
]
VALUES += [[[]], {"x": 1}, ["x"], [1, 2], float("nan"), float("inf"), "9" * 200, "a" * 300]


def spoilt(rng: random.Random, data: bytes, other: bytes, suffix: str) -> tuple[bytes, str]:
    """(changed content, what was done); one to three changes."""
    how = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        ways = [flip, flip, piece, insert, delete, cut, repeat, splice, number, number]
        ways += [line] * 3 if b"\n" in data[:2000] else []
        ways += [another] * 8 if suffix in (".json", ".yaml") else []
        way = rng.choice(ways)
        data = way(rng, data, other)
        how.append(way.__name__)
    return data, " + ".join(how)


def _place(rng: random.Random, data: bytes) -> int:
    """Anywhere, more often near the beginning or the end, where headers are."""
    n = len(data)
    return rng.choice([rng.randrange(n + 1), rng.randrange(min(n, 200) + 1), n - rng.randrange(min(n, 200) + 1)])


def flip(rng: random.Random, data: bytes, _: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8]) if made else 0):
        made[min(_place(rng, data), len(made) - 1)] ^= 1 << rng.randrange(8)
    return bytes(made)


def piece(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at, new = _place(rng, data), rng.choice(PIECES)
    return data[:at] + new + data[at + rng.choice([0, 1, len(new)]) :]


def insert(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + rng.randbytes(rng.choice([1, 2, 4, 100])) + data[at:]


def delete(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + data[at + rng.choice([1, 2, 4, 30, 1000]) :]


def cut(rng: random.Random, data: bytes, _: bytes) -> bytes:
    return data[: _place(rng, data)]


def repeat(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at, n = _place(rng, data), rng.choice([1, 8, 50, 1000])
    return data[:at] + data[at : at + n] * rng.choice([2, 3]) + data[at + n :]


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at, from_, n = _place(rng, data), _place(rng, other), rng.choice([4, 50, 1000])
    return data[:at] + other[from_ : from_ + n] + data[at + n :]


def line(rng: random.Random, data: bytes, _: bytes) -> bytes:
    """A line twice, away, or elsewhere."""
    lines = data.split(b"\n")
    at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
    return b"\n".join(rng.choice([lines[:at] + lines[at + 1 :], [*lines[:to], lines[at], *lines[to:]]]))


def number(rng: random.Random, data: bytes, _: bytes) -> bytes:
    """An extreme number in the place of another one, often of the same length, as a header needs it."""
    first = max(0, _place(rng, data) - 500)
    if not (found := list(re.finditer(rb"-?\d+(\.\d+)?", data[first : first + 1000]))):
        return data
    one, new = rng.choice(found), rng.choice(NUMBERS).encode()
    if rng.random() < 0.4:
        new = new[: len(one.group())].rjust(len(one.group()), rng.choice([b"0", b"9", b"1"]))
    return data[: first + one.start()] + new + data[first + one.end() :]


def another(rng: random.Random, data: bytes, _: bytes) -> bytes:
    """A value of another type, or a key away, somewhere in JSON or YAML."""
    try:
        whole = yaml.safe_load(data) if not data.lstrip().startswith(b"{") else json.loads(data)
    except Exception:  # spoilt before
        return data
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            if key == "checksum":  # without it a file is one of an earlier version
                continue
            places.append((value, key))
            walk(value[key])

    walk(whole)
    if not places:
        return data
    of, key = rng.choice(places)
    if rng.random() < 0.2:
        del of[key]
    else:
        of[key] = rng.choice(VALUES)
    if data.lstrip().startswith(b"{"):
        return (json.dumps(whole, indent=2, ensure_ascii=False) + "\n").encode()
    return yaml.safe_dump(whole, sort_keys=False, allow_unicode=True).encode()


def same(a: Any, b: Any) -> bool:
    """Are two results equal, to the bit?"""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, pd.DataFrame):
        return isinstance(b, pd.DataFrame) and [*a] == [*b] and a.equals(b)
    if isinstance(a, torch.Tensor):
        a, b = a.numpy(), b.numpy()
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b or (a != a and b != b)
