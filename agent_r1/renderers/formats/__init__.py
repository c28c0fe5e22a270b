"""How models write tool calls: one file per way, and the choice among them."""
