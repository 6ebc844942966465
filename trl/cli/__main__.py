"""`python -m trl.cli`: the command `trl` for launchers that take a module."""

import sys

from trl.cli.main import main

sys.exit(main())
