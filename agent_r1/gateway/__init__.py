"""The gateway: an HTTP server through which agents call a model, with the APIs of OpenAI and Anthropic."""
