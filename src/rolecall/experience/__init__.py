"""Experience: trajectories as batches, and on disk."""
