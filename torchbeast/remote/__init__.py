"""What only PolyBeast needs: environment servers, streams to them, their protocol."""

# What a stream carries at most.
MAX_ENVS = 4096
MAX_MESSAGE_BYTES = 2**28  # The learner takes no larger response.
MAX_BESIDE_STEP_BYTES = 2**21  # A Welcome, metrics and lengths.
MAX_STEP_BYTES = MAX_MESSAGE_BYTES - MAX_BESIDE_STEP_BYTES
