"""Code that runs inside the sandbox. These files are run as scripts or sent as text, and import only Python's standard
library."""
