"""Names of the files of Megatron's checkpoints. Imports nothing: commands ask before torch."""

METADATA = ".metadata"
CONFIG = "metadata.json"
COMMON = "common.pt"
LATEST = "latest_checkpointed_iteration.txt"  # of a training: beside the folders of its saves
