from agent_r1 import Message, Task, ToolEnv, exact_match

FACTS = {"capital": "Brodra", "river": "Corimis", "mayor": "Dovuban", "twin": "Elamis", "rival": "Fenedra"}


def search(query: str) -> str:
    """Find a page."""
    return f"{query}: " + " ".join(f"{relation} {value}." for relation, value in FACTS.items())


env = ToolEnv(tools=[search], rewards=[exact_match])
tasks = [Task(r, (Message.user(f"What is the {r} of Alaban?"),), {"answers": (FACTS[r],)}) for r in FACTS]
