"""What becomes of an error that a user can mend."""

import os
import sys

from trl.errors import TRLError


def report_error(error: TRLError) -> None:
    """Print an error as one line on standard error, or raise it if TRL_TRACEBACK asks for that."""
    if os.environ.get("TRL_TRACEBACK", "0") not in ("", "0"):
        raise error
    print("trl: " + " ".join(str(error).split()), file=sys.stderr)
