"""One tree of errors. Every class is also the standard-library error a caller would expect to catch."""


class TRLError(Exception):
    """Base of all errors this package raises on purpose."""


class ConfigError(TRLError, ValueError):
    """A setting, or a combination of settings, that cannot work. The text names the value and the fix."""


class DataError(TRLError, ValueError):
    """A dataset, a row or a column that cannot be used. The text names the column, and the row where one is known."""


class RewardError(TRLError, ValueError):
    """A reward function that broke its contract. The text names the function."""


class MissingDependencyError(TRLError, ImportError):
    """An optional package that is not installed, or has an unsupported version. The text holds the install command."""


class NotSupportedError(TRLError, NotImplementedError):
    """A documented option whose capability this version does not have."""


class GenerationError(TRLError, RuntimeError):
    """An engine could not produce the completions it was asked for."""
