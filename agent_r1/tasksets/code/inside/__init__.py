"""Code that runs in the sandbox: the task set reads it as text, and no module imports it."""
