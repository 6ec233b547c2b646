"""A worker that dies when it starts, for the tests of the pool."""

import os

os._exit(9)
