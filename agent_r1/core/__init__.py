"""Values and protocols that all other subpackages share. This subpackage imports only the standard library."""
