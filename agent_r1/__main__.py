"""The program ``agent-r1`` as ``python -m agent_r1``."""

from agent_r1.cli import enter

if __name__ == "__main__":
    enter()
