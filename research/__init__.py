"""Research scripts that are not installed: the paper comparison and the making of tiny-base."""
