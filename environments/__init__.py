"""Task sets that are not installed. From a checkout: ``agent-r1 train --taskset environments/people``."""
