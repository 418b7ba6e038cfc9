"""Whole checkpoints, an exact resume, and early ends of training that always leave a checkpoint."""
