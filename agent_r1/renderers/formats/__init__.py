"""Tool-call formats: the ways in which models write tool calls, and the detection of the format of a template."""
