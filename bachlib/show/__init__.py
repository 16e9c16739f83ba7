"""Pictures and pages: the only room that knows plotly and widgets."""
