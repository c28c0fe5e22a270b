"""Tool-call formats: one module per way in which models write calls, and the detection of a template's format."""
