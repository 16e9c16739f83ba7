"""The explorer, an application for JupyterLab, the session behind it, and the sphere with sliders."""

from bachlib.show.explorer.application import Explorer
from bachlib.show.explorer.widgets import sphere_explorer

__all__ = ["Explorer", "sphere_explorer"]
