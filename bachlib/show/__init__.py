"""Pictures and pages: the only room that knows plotly and widgets."""

from bachlib import needs

needs("bachlib.show", "lab", "plotly")
