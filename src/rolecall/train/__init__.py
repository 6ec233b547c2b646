"""Training: the step, the loop, and the files under a run."""
