"""Acting: messages to tokens and back, engines, the agent loop, and the collector of groups."""
