"""Every error the package raises on purpose.

Each message names the culprit, the value seen and the cure. All of them derive from `ZeroError`, so that a
training script can tell our refusals from a failure of its own code.
"""


class ZeroError(Exception):
    """Base of every error raised on purpose by zero-plugin."""


class ConfigError(ZeroError, ValueError):
    """A setting is unknown, malformed, contradictory or not supported by this version."""


class UnknownSettingError(ConfigError, TypeError):
    """A setting that does not exist, or one given by position; a TypeError too, as for any unknown argument."""


class ParameterError(ZeroError, ValueError):
    """A model parameter cannot be managed: non-leaf, duplicated, foreign, or of an unsupported dtype."""


class OptimizerError(ZeroError, TypeError):
    """An optimizer cannot run on shards, or its parameters are not the model's."""


class GradientAccessError(ZeroError, RuntimeError):
    """A gradient that the engine owns was read or written through `Parameter.grad`."""


class NonFiniteGradientError(ZeroError, ArithmeticError):
    """A gradient holds NaN or infinity and the configuration asks to stop."""


class BudgetError(ZeroError, MemoryError):
    """A buffer pool or a tier cannot hold what is asked of it."""


class LaneError(ZeroError, RuntimeError):
    """An asynchronous operation failed; the cause is chained."""


class LeaseError(ZeroError, RuntimeError):
    """A buffer was touched while an operation still owned it, or after it was given back."""


class CollectiveMismatchError(ZeroError, RuntimeError):
    """Ranks disagree on the collective they are in."""


class CollectiveTimeoutError(ZeroError, TimeoutError):
    """A rank did not join a collective within the deadline."""


class EngineStateError(ZeroError, RuntimeError):
    """A call is not legal in the engine's present state, for example after `close()`."""


class CheckpointError(ZeroError, RuntimeError):
    """A checkpoint does not fit the model, optimizer or version it is loaded into."""


class StoreError(ZeroError, OSError):
    """Reading, writing or reserving a file of the NVMe tier failed, or its bytes are not those written."""


class NativeExtensionError(ZeroError, ImportError):
    """The compiled extension is missing or does not fit this machine."""


class FrameworkError(ZeroError, ImportError):
    """A framework's release is not one that this version knows how to enter."""
