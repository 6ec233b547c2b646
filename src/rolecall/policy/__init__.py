"""Language-model policies: loading, heads, log-probs (the one place) and chat rendering."""
