"""What holds for all tests: one thread, so that tests side by side do not fight over cores."""

import torch

torch.set_num_threads(1)
