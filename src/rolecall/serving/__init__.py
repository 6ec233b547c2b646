"""Our own engine behind HTTP."""
