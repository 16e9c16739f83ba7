"""Raw log → sequences → windows."""

from bachlib.data.dataset import Dataset
from bachlib.data.prepare import prepare
from bachlib.data.windows import Windows

__all__ = ["Dataset", "Windows", "prepare"]
