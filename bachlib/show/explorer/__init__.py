"""The explorer, an application for JupyterLab, and the session behind it."""

from bachlib.show.explorer.application import Explorer

__all__ = ["Explorer"]
