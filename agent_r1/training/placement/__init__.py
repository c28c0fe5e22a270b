"""Where the processes of a run are: ranks and vLLM servers in the actors of a Ray cluster."""
