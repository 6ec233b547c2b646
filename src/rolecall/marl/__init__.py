"""Multi-agent episodes: batches with a role for every agent and step, environments, runners, networks, learners."""
