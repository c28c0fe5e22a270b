"""The program ``agent-r1``, run as ``python -m agent_r1``, such as ``python -m agent_r1 train``."""

from agent_r1.cli import enter

if __name__ == "__main__":
    enter()
