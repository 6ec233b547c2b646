"""Episodes of several turns: `conversation` keeps tokens and roles, `pool` runs environments, `play` plays."""
