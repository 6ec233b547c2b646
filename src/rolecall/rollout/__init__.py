"""Rollout engines: from prompts to sampled answers with their log-probs, and nothing learned on the way."""
