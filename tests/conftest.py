"""What holds for all tests: one thread, so that tests side by side do not fight over cores; no test is a timing."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
