"""`python -m miles` is the `miles` command."""

import sys

from miles.cli.main import main

sys.exit(main())
