"""What rolecall, TRL, verl and OpenRLHF offer of the interface. The last three are imported only where installed."""
