"""Shared by all tests: one compute thread each, because the suite itself runs in parallel."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
