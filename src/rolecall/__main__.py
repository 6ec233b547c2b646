"""`python -m rolecall`."""

import sys

from rolecall.cli import main

sys.exit(main())
