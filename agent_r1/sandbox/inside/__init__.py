"""What runs inside the sandbox, sent there as text: each file needs the standard library only, and no other file."""
