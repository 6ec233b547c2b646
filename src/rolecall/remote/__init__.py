"""Engines on other machines: the client side of servers that sample."""
