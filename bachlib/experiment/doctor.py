"""What `bach doctor` finds: versions, threads, devices, and which optional parts are there."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from bachlib import __version__
from bachlib.files import output_dir, versions


def findings() -> Iterator[str]:
    """Line by line."""
    yield f"bachlib {__version__}, {platform.platform()}, {platform.python_implementation()}"
    yield "\nversions"
    for name, version in versions().items():
        yield f"  {name:<14} {version}"
    yield f"\nthreads        torch {torch.get_num_threads()}, cores {os.cpu_count()}"
    free = shutil.disk_usage(next(p for p in [output_dir(), *output_dir().parents] if p.exists())).free
    yield f"outputs        {output_dir()} ({free / 1e9:.0f} GB free)"
    yield "\nparts"
    parts = [
        _cuda(),
        _faiss(),
        _module("umap", "maps of items and heads", "pip install umap-learn"),
        _data(),
        _chrome(),
    ]
    for mark, name, said in parts:
        yield f"  {mark} {name:<12} {said}"


def _cuda() -> tuple[str, str, str]:
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return "✓", "CUDA", names
    return (
        "–",
        "CUDA",
        "no GPU seen by torch; everything runs on the CPU. With a GPU: install torch's CUDA build and a driver",
    )


def _faiss() -> tuple[str, str, str]:
    found = {name: version for name, version in versions().items() if name.startswith("faiss")}
    if not found or importlib.util.find_spec("faiss") is None:
        return (
            "–",
            "faiss",
            "missing: approximate serving needs it; pip install faiss-cpu, or faiss-gpu-cu12 on a GPU host",
        )
    if len(found) > 1:
        return (
            "✗",
            "faiss",
            f"{' and '.join(found)} are both installed and overwrite each other: uninstall both, install one",
        )
    return "✓", "faiss", " ".join(next(iter(found.items())))


def _module(name: str, use: str, how: str) -> tuple[str, str, str]:
    there = importlib.util.find_spec(name) is not None
    return ("✓", name, use) if there else ("–", name, f"missing: {use} need it; {how}")


def _data() -> tuple[str, str, str]:
    folder = os.environ.get("BACH_DATA_DIR")
    if not folder:
        return (
            "–",
            "real data",
            "BACH_DATA_DIR is not set: tests on real logs are skipped; point it at the folder that holds them",
        )
    if not Path(folder).is_dir():
        return "✗", "real data", f"BACH_DATA_DIR is {folder}, which is not a folder"
    return "✓", "real data", f"{folder}: {', '.join(sorted(p.name for p in Path(folder).iterdir())[:6])}"


def _chrome() -> tuple[str, str, str]:
    found = next((path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None)
    return (
        ("✓", "Chrome", found)
        if found
        else ("–", "Chrome", "none found: pictures stay interactive, PNG copies cannot be made")
    )
