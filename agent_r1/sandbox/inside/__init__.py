"""Code that runs inside the sandbox and is sent there as text. Each file uses the standard library only."""
