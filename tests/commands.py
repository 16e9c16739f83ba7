"""`bach` as a user types it."""

import os
import subprocess
import sys


def command(*words):
    return [sys.executable, "-m", "bachlib.cli", *map(str, words)]


def surroundings(**variables):
    return {**os.environ, "COLUMNS": "120", **{name: str(value) for name, value in variables.items()}}


def bach(*words, cwd=None, **variables):
    return subprocess.run(command(*words), capture_output=True, text=True, env=surroundings(**variables), cwd=cwd)
