"""The conversion of messages to tokens and of tokens to messages: renderers, tool-call formats and stop strings."""
