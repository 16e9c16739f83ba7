"""A few inputs of every fuzzer, and that a fuzzer finds what is wrong. `make fuzz` tries thousands."""

import json
from pathlib import Path

import fuzz
import pytest
from fuzzed import FUZZERS, Fuzzer

from bachlib import BachError

NEW = dict.fromkeys(("amazon", "kuairand", "lastfm", "tar", "yambda", "recbole"), 2)
SLOW = {"journey": 2, "zip": 3} | NEW  # inputs; each prepares a log


@pytest.mark.parametrize("name", FUZZERS)
def test_spoilt_files_are_refused_or_read_rightly(name):
    ours = FUZZERS[name].ours or name == "params"
    counts = fuzz.fuzz(FUZZERS[name], 12 if ours else SLOW.get(name, 4), first=1_000_000, say=lambda *_: None)
    assert not counts["findings"] and counts["refused"] + counts["read"] == counts["inputs"] > 0


def read(folder: Path) -> dict:
    """A reader with four faults: it may raise anything, names no file, takes long, or takes what is damaged."""
    text = (folder / "a.json").read_bytes()
    if b"[" in text:
        raise BachError("something is wrong")
    return {"n": len(json.loads(text)), "raw": text.count(b"3")}


def test_what_a_fuzzer_finds():
    mine = Fuzzer("mine", lambda to: (to / "a.json").write_text('{"a": 1, "b": "x", "c": 3}'), read, ours=True)
    found = fuzz.fuzz(mine, 300, say=lambda *_: None)["findings"]
    for told in ("JSONDecodeError", "UnicodeDecodeError", "no file is named: something", "the damage was not noticed"):
        assert any(told in one for one in found), told
    again = fuzz.fuzz(mine, 300, say=lambda *_: None)["findings"]
    assert [one.replace("bach", "") for one in found] == [one.replace("bach", "") for one in again], "by its seed"


def test_what_takes_too_long_is_a_finding(monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)

    def endless(folder: Path) -> str:
        while (text := (folder / "a").read_text(errors="replace")) != "good":
            pass
        return text

    mine = Fuzzer("mine", lambda to: (to / "a").write_text("good"), endless)
    (one,) = fuzz.fuzz(mine, 1, first=3, say=lambda *_: None)["findings"]
    assert "TooLong: more than 0.2 seconds" in one


def test_a_name_that_is_no_fuzzer(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fuzz.py", "1", "none"])
    with pytest.raises(SystemExit):
        fuzz.main()
    assert "there is no fuzzer none; there are csv, " in capsys.readouterr().err
