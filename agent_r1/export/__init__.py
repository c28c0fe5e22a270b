"""Export a run: write its model, adapter, trajectories or metrics in the formats of other tools."""
