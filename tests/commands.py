"""`bach` as a user types it."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from bachlib import cli


def command(*words):
    return [sys.executable, "-m", "bachlib.cli", *map(str, words)]


def surroundings(**variables):
    return {**os.environ, "COLUMNS": "120", **{name: str(value) for name, value in variables.items()}}


def bach(*words, cwd=None, **variables):
    return subprocess.run(command(*words), capture_output=True, text=True, env=surroundings(**variables), cwd=cwd)


def bach_here(*words, **variables):
    """The same in this process: no second Python has to start."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    argv = mock.patch.object(sys, "argv", ["bach", *map(str, words)])
    code = 0
    with mock.patch.dict(os.environ, surroundings(**variables)), argv, redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
    told = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess(words, code, *told)
