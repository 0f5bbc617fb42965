"""``python -m flax_ckpt_compat`` is the ``flax-ckpt`` command."""

from flax_ckpt_compat.cli import main

if __name__ == "__main__":
    main(prog_name="flax-ckpt")
