"""The command line: thin, and quick to answer. A command's module is imported only when that command runs."""
