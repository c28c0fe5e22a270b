"""What each command of ``agent-r1`` does."""
