"""Methods whose interface may still change. Importing one of them says so, unless `TRL_EXPERIMENTAL_SILENCE` is set."""

import os
import warnings

from trl.errors import TRLExperimentalWarning

if not os.environ.get("TRL_EXPERIMENTAL_SILENCE"):
    warnings.warn(
        "What `trl.experimental` offers may change or go in any release. Set TRL_EXPERIMENTAL_SILENCE=1 to silence "
        "this warning.",
        TRLExperimentalWarning,
        stacklevel=2,
    )
