from agent_r1 import Task, ToolEnv, Trainer, exact_match

FACTS = {"capital": "Brodra", "river": "Corimis", "mayor": "Dovuban", "twin": "Elamis", "rival": "Fenedra"}


def search(query: str) -> str:
    """Find a page."""
    return f"{query}: " + " ".join(f"{relation} {value}." for relation, value in FACTS.items())


env = ToolEnv(tools=[search], rewards=[exact_match])
tasks = [Task(r, f"What is the {r} of Alaban?", {"answers": (FACTS[r],)}) for r in FACTS]
if __name__ == "__main__":
    Trainer(env, tasks, model="tiny-base", steps=20).train()
