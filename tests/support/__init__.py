"""Helpers that several test folders share: random checkpoints, reference model, reference experts."""

import torch

# Tiny models gain nothing from a second thread, and lose much where other processes want the cores too.
torch.set_num_threads(1)
