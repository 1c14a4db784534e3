"""Drafts' training, as commands: `train.run`, `train.regenerate`, `train.features`, `train.restore`."""

import os

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch
