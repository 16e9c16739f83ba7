"""Raw log → sequences → windows."""

from bachlib.data.dataset import Dataset, Windows
from bachlib.data.prepare import prepare

__all__ = ["Dataset", "Windows", "prepare"]
