"""Names of the project's files."""
MODEL_PREFIX = "model_"
STATE_PREFIX = "opt_state_"
