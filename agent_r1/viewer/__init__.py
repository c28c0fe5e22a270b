"""A local web page that shows runs: their curves, attempts, conversations and tokens, also during training."""
