"""Recipes: one screen each, naming the steps of the method."""
