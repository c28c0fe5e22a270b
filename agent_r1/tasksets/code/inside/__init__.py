"""What runs in the sandbox: read as text by the world, imported by nobody."""
