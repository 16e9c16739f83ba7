"""BACH, a Bayesian Admixture of Contrastive Heads: the package behind the workbook's notebooks.

The data flows from left to right, and a room imports only rooms to its left:
data → model → rank → train → evaluate → serve → show → experiment → bench.
"""

import os
from importlib.util import find_spec

__version__ = "0.1.0"

# Modules that the base install leaves out, by the extra of pyproject.toml that installs them.
EXTRAS = {
    "lab": """plotly ipywidgets anywidget umap jupyterlab jupytext papermill nbclient nbconvert nbformat latex2mathml
           kaleido PIL distributed psutil""".split(),
    "sweep": "distributed papermill nbclient nbformat ipykernel psutil".split(),
    "faiss-cpu": ["faiss"],
    "trackers": ["tensorboard", "mlflow"],
    "export": "onnx onnxscript onnxruntime qdrant_client".split(),
}


class BachError(Exception):
    """An error that the user can correct: the message says what was wrong, where, and what would be right."""


class NotFinite(BachError):
    """A value that should be finite is not; in training this means divergence."""


class MissingExtra(BachError, ImportError):
    """A part of the package needs modules that the base install leaves out."""


def needs(part: str, extra: str, *modules: str) -> None:
    """Raise `MissingExtra` unless these modules of an extra (default: all of them) are installed."""
    for module in modules or EXTRAS[extra]:
        if find_spec(module) is None:
            raise MissingExtra(f"{part} needs {module}: pip install 'bachlib[{extra}]'")


# Compiled loops are cached beside the code or in the home. Where neither can be written, they go to the outputs folder.
if not any(os.access(folder, os.W_OK) for folder in (os.path.dirname(__file__), os.path.expanduser("~"))):
    from bachlib.files import output_dir  # late: it imports the errors above

    os.environ.setdefault("NUMBA_CACHE_DIR", str(output_dir("numba")))
