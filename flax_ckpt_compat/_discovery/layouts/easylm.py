"""Read the streams of EasyLM: msgpack objects one after the other, each a key path and the bytes of a leaf.

``StreamingCheckpointer`` writes ``streaming_params_80000`` and the like. Each leaf is a msgpack document of Flax.
"""

from __future__ import annotations

from flax_ckpt_compat._discovery import foreign
from flax_ckpt_compat._discovery.formats import open_stream
from flax_ckpt_compat._discovery.layouts.layout import ReadOnlyLayout, is_step

LAYOUT = ReadOnlyLayout("stream", open_stream, lambda path, look: look == foreign.STREAM and not is_step(path.name))
