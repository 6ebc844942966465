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


class ServerError(TRLError, RuntimeError):
    """A server that did not do what it was asked to.

    Attributes:
        method, path: the call.
        status: HTTP status, or None where no answer came.
        server_message: what the server said.
    """

    def __init__(
        self, text: str, *, method: str = "", path: str = "", status: int | None = None, server_message: str = ""
    ):
        super().__init__(text)
        self.method = method
        self.path = path
        self.status = status
        self.server_message = server_message


class ServerUnreachableError(ServerError, ConnectionError):
    """Nobody answers there, or the connection broke."""


class ServerTimeoutError(ServerError, TimeoutError):
    """No answer within the deadline."""


class ServerVersionError(ServerError):
    """A vLLM version outside the supported range."""


class WeightSyncError(TRLError, RuntimeError):
    """Weights that did not reach an engine.

    Attributes:
        phase: where it happened: check, join, pause, start, update, finish, caches, resume, verify.
        repaired: whether the engine serves the previous weights again.
    """

    def __init__(self, text: str, *, phase: str, repaired: bool):
        super().__init__(text)
        self.phase = phase
        self.repaired = repaired


class ParityError(TRLError, RuntimeError):
    """The engine's log-probs are not those of the trainer's weights."""


class DeviceMemoryError(TRLError, MemoryError):
    """A GPU whose memory ran out. The text holds the plan of what it has to hold, and what to change."""


class TRLExperimentalWarning(UserWarning):
    """A method whose interface may still change."""
