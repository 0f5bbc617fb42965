"""Options of one restore: settings and transforms, read once by the public functions and passed down."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax_ckpt_compat import config
from flax_ckpt_compat._core import arguments
from flax_ckpt_compat._restore.transform_spec import TransformSpec


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreOptions:
    """Options of one restore."""

    settings: config.Settings  # the policies, ``dtype``, ``structure`` and ``mapped`` in force
    transforms: TransformSpec = dataclasses.field(default_factory=TransformSpec)  # the caller's rules or transforms
    item: str | None = None  # the item to restore, as one tree; None for all

    @classmethod
    def strict(
        cls, transforms: Any, default_to_original: bool, *, item: str | None = None, **policies: Any
    ) -> RestoreOptions:
        """Return the options of `flax_ckpt_compat.restore`: a policy of None takes the setting or its default."""
        given = {name: value for name, value in policies.items() if value is not None}
        with config.defaults(config.STRICT), config.override(**given) as settings:
            by_default = arguments.flag(default_to_original, "transforms_default_to_original")
            spec = TransformSpec(transforms, default_to_original=by_default, strict=True)
            return cls(settings, spec, arguments.item_name(item))

    @property
    def casts(self) -> bool:
        """Return whether arrays and numbers are cast to the dtype of the target's leaf."""
        return self.settings.dtype == "target"
