"""Define the names and limits of the msgpack format."""

from __future__ import annotations

# Extension codes, measured on files of Flax 0.3.6 to 0.12.8. Up to Flax 0.8.5 a Python complex was written as a
# numpy scalar; such a file does not distinguish the two, and Flax too reads np.complex128.
EXT_ARRAY = 1
EXT_COMPLEX = 2
EXT_NUMPY_SCALAR = 3
# Only in the files that Orbax up to 0.5.15 put into its directories: a tuple, as one msgpack array.
EXT_TUPLE = 4

# Flax splits larger arrays into a map of flat pieces with exactly these keys.
MAX_CHUNK_SIZE = 2**30
CHUNK_FLAG = "__msgpack_chunked_array__"
CHUNK_KEYS = frozenset((CHUNK_FLAG, "shape", "chunks"))

# Ours: Flax refuses typed PRNG keys. It reads this map as a dict of a string and an array.
KEY_IMPL = "__flax_ckpt_compat_prng_key__"
KEY_KEYS = frozenset((KEY_IMPL, "data"))

# Prefix of a string that refers to an array in the folder beside the file.
PLACEHOLDER = "//GDAPlaceholder:"

# Levels. msgpack's own packer stops near this depth, so no real file is deeper; a deeper one is hostile and would
# exhaust the Python stack when the tree is walked.
MAX_DEPTH = 512
