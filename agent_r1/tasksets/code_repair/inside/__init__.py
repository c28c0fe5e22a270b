"""Code that runs in the sandbox. The task set reads the code as text; no module imports the code."""
