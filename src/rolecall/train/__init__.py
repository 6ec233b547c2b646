"""Training: the step (blind to the algorithm), the loop, checkpoints, metrics and tripwires."""
