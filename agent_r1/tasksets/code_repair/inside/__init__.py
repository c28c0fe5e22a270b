"""Programs for the sandbox. The task set reads them as text and does not import them."""
