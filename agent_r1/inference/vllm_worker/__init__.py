"""What a vLLM server imports. Its own Python runs this folder, so it imports nothing of this package."""
