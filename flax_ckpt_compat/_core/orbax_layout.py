"""Define what an Orbax directory looks like: file names, markers, words. Leaves have key paths joined with dots."""

from __future__ import annotations

import re

# A tree.
TREE_METADATA = "_METADATA"
MSGPACK_FILE = "checkpoint"  # of releases until 0.5.15; other tools give text files this name
SHARDING = "_sharding"
STRINGS = "_strings.json"
ARRAY_METADATAS = "array_metadatas"

# Words of TREE_METADATA: types of leaves that are arrays.
JAX_ARRAY, NP_ARRAY = "jax.Array", "np.ndarray"

# The OCDBT database of its arrays.
MANIFEST = "manifest.ocdbt"
DATA_DIRECTORY = "d"
DATA_FILE_PATTERN = r"[0-9a-f]{32}"
PROCESS_PREFIX = "ocdbt.process_"  # directories with the databases of single processes

# The zarr metadata of one array.
ZARR2_METADATA = ".zarray"
ARRAY_METADATA_FILES = (ZARR2_METADATA, "zarr.json")  # the other one is of zarr v3
ZARR2_CHUNK = re.compile(r"\d+(\.\d+)*")

# A whole checkpoint: of one tree, or of items.
STEP_METADATA = "_CHECKPOINT_METADATA"
V1_MARKER = "orbax.checkpoint"
COMMIT_FILE = "commit_success.txt"
COMMITTED = b"Checkpoint commit was successful"  # its content
TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax treats every name that contains this as unfinished
PARTIAL_SAVE = ".partial_save"  # v1 writes parts below a directory with this suffix until they are finalized
CHECKSUMS = "flax_ckpt_compat.checksums"  # ours, beside each database; real Orbax ignores it
# Ours, while a save runs; removed at its end.
BEGUN = "_begun"  # a running save
_UPLOAD_MARKER = re.compile(rf"{BEGUN}\.\d+\.[0-9a-f]{{32}}")
TREE_FILES = (TREE_METADATA, MSGPACK_FILE, SHARDING, STRINGS, MANIFEST, CHECKSUMS, *ARRAY_METADATA_FILES)  # of a tree
DESCRIPTOR = "descriptor"  # of internal releases of Orbax; holds nothing of the user's
STEP_FILES = (STEP_METADATA, V1_MARKER, COMMIT_FILE, DESCRIPTOR)  # beside the items

# Items.
TREE_ITEMS = ("default", "state", "pytree", "items", "params")  # usual names of the only tree, or the main one
# Items that are not trees.
SINGLE_ARRAY = "checkpoint"  # the directory, or the key prefix, of the array
JAX_KEY = "jax_random_key"
NUMPY_KEY = "np_random_key"
JSON_FILES = ("metadata", "metrics", "data.json")  # the last one of v1


def is_upload_marker(name: str) -> bool:
    """Return whether a name is that of the object that tells of a save to a store, or of a removal."""
    return _UPLOAD_MARKER.fullmatch(name) is not None
