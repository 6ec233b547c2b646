"""Models: loading, heads, log-probs, chat rendering, adapters, and the built-in tiny one."""
