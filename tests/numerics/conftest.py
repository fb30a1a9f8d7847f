"""Tiny matrices: one thread each, so that parallel workers do not fight over two cores."""

import torch

torch.set_num_threads(1)
