"""Code that runs inside the sandbox. The files are started or sent as text, and import only the standard library."""
