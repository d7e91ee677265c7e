"""The formulas of the three papers, as they stand there once their misprints are put right. Pure arithmetic, bytes throughout.

ZeRO (SC'20), ZeRO-Offload (ATC'21) and ZeRO-Infinity (SC'21) are quoted by section and equation. What an engine really
allocates, padding and buffers included, is not computed here but asked of its own parts: `zero_plugin.planner.dry`.
"""

from __future__ import annotations

from zero_plugin.errors import ConfigError

ADAM_BYTES = 12
"""K of ZeRO: fp32 master, momentum and variance of a parameter."""

HALF_BYTES = 2
"""Of a low-precision parameter or gradient."""

INFINITY_STATE_BYTES = 20
"""ZeRO-Infinity counts an fp32 gradient too."""

UPDATE_BYTES = 28
"""Memory traffic of one Adam update: 2 for the gradient, 12 read and 12 written, 2 for the new weight."""


def _check(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not value >= 0:
            raise ConfigError(f"{name}={value!r} is not a size: give a number, 0 or more")


def _check_stage(stage: int, world_size: int) -> None:
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"stage={stage!r} is not one of 0, 1, 2, 3")
    if type(world_size) is not int or world_size < 1:
        raise ConfigError(f"world_size={world_size!r} must be a whole number above 0")


def model_state_bytes(
    parameters: float,
    world_size: int,
    stage: int,
    *,
    optimizer_bytes: float = ADAM_BYTES,
    parameter_bytes: float = HALF_BYTES,
    gradient_bytes: float = HALF_BYTES,
) -> float:
    """Bytes of weights, gradients and optimizer states on one rank (ZeRO, section 5 and Table 1).

    Args:
        parameters: Psi.
        world_size: N, the data-parallel degree.
        stage: 0: everything on every rank; 1: optimizer states sharded; 2: and gradients; 3: and weights.
        optimizer_bytes: K, of one parameter's optimizer states.
        parameter_bytes: of one compute weight.
        gradient_bytes: of one gradient.

    Raises:
        ConfigError: a size is negative, or the stage does not exist.
    """
    _check(
        parameters=parameters,
        optimizer_bytes=optimizer_bytes,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
    )
    _check_stage(stage, world_size)
    return parameters * sum(
        nbytes / (world_size if stage >= sharded_from else 1)
        for nbytes, sharded_from in (
            (optimizer_bytes, 1),
            (gradient_bytes, 2),
            (parameter_bytes, 3),
        )
    )


def communication_elements(parameters: float, world_size: int, stage: int) -> float:
    """Elements that one rank sends in a step (ZeRO, section 7): 2 Psi, and 3 Psi at stage 3, times (N-1)/N."""
    _check(parameters=parameters)
    _check_stage(stage, world_size)
    return (3 if stage == 3 else 2) * parameters * (world_size - 1) / world_size


def largest_model(
    device_bytes: float, world_size: int, stage: int, *, optimizer_bytes: float = ADAM_BYTES
) -> float:
    """Parameters whose states alone fill a device: ZeRO's "maximum theoretical model size" (Table 2)."""
    _check(device_bytes=device_bytes)
    return device_bytes / model_state_bytes(1, world_size, stage, optimizer_bytes=optimizer_bytes)


# Transformers (ZeRO-Infinity, section 3) --------------------------------------------------------------------------


def transformer_parameters(layers: int, hidden: int) -> int:
    """Equation (1): parameters of the blocks, biases and embeddings left out."""
    _check(layers=layers, hidden=hidden)
    return 12 * layers * hidden**2


def transformer_state_bytes(layers: int, hidden: int) -> int:
    """Equation (2): bytes of all model states, 20 a parameter."""
    return INFINITY_STATE_BYTES * transformer_parameters(layers, hidden)


def checkpoint_bytes(
    batch: float, sequence: int, hidden: int, layers: int, *, every: int = 1
) -> float:
    """Equation (3): bytes of the inputs of activation checkpoints, one for `every` blocks."""
    _check(batch=batch, sequence=sequence, hidden=hidden, layers=layers)
    return 2 * batch * sequence * hidden * layers / max(1, every)


def state_working_bytes(hidden: int, *, tiles: int = 1) -> float:
    """Equation (4): weight and gradient of the largest linear (h to 4h), in `tiles` parts."""
    _check(hidden=hidden)
    return 4 * hidden * 4 * hidden / max(1, tiles)


def activation_working_bytes(
    batch: float, sequence: int, hidden: int, heads: int, *, every: int = 1
) -> float:
    """Equation (5), in bytes: activations of the blocks between two checkpoints.

    The paper prints the number of elements; its Figure 2a has the bytes.
    """
    _check(batch=batch, sequence=sequence, hidden=hidden, heads=heads)
    return 2 * batch * sequence * every * (16 * hidden + 2 * heads * sequence)


def step_flops(batch: float, sequence: int, parameters: float) -> float:
    """Equation (7): forward, recomputation and backward, 8 a token and parameter."""
    _check(batch=batch, sequence=sequence, parameters=parameters)
    return 2 * 4 * batch * sequence * parameters


def intensity_of_parameters(batch: float, sequence: int) -> float:
    """Equation (9): operations for a byte of parameters and gradients moved."""
    return sequence * batch


def intensity_of_optimizer(batch: float, sequence: int) -> float:
    """Equation (10): operations for a byte of optimizer states moved."""
    return sequence * batch / 4


def intensity_of_checkpoints(hidden: int, *, every: int = 1) -> float:
    """Equation (11): operations for a byte of checkpoints moved."""
    return 24 * hidden * every


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Equation (6): the part of `peak` that is left where traffic is not overlapped at all.

    Args:
        intensity: operations for a byte.
        bandwidth: bytes a second.
        peak: operations a second that are achieved without traffic.
    """
    _check(intensity=intensity, bandwidth=bandwidth)
    if not peak > 0:
        raise ConfigError(f"peak={peak!r} must be above 0: achieved operations a second")
    return intensity * bandwidth / (intensity * bandwidth + peak)


def bandwidth_for(share: float, intensity: float, peak: float) -> float:
    """Equation (6) turned round: bytes a second that leave `share` of the peak."""
    if not 0 < share < 1 or not intensity > 0:
        raise ConfigError(
            f"share={share!r} must lie between 0 and 1, and intensity={intensity!r} above 0"
        )
    return peak * share / (1 - share) / intensity


# Tokens that hide traffic ------------------------------------------------------------------------------------------


def tokens_to_hide_update(
    flops: float, update_bandwidth: float, *, recompute: bool = True
) -> float:
    """Tokens of a step and rank whose computation takes as long as the update of the rank's share on its host.

    Both grow with the number of parameters, so that it cancels.

    Args:
        flops: operations a second of one rank.
        update_bandwidth: bytes a second at which the rank's share of a host updates.
        recompute: whether activations are checkpointed (8 operations a token and parameter instead of 6).
    """
    return UPDATE_BYTES * flops / update_bandwidth / (8 if recompute else 6)


def tokens_to_hide_weights(flops: float, link: float, *, parameter_bytes: float = 2) -> float:
    """Tokens of a micro-batch whose forward takes as long as the weights need to come over a link."""
    return parameter_bytes * flops / link / 2


def tokens_to_hide_files(flops: float, disk: float, *, recompute: bool = True) -> float:
    """Tokens of a step whose computation takes as long as 12 bytes a parameter are read and written."""
    return 2 * ADAM_BYTES * flops / disk / (8 if recompute else 6)
