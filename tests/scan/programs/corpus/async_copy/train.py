import asyncio
import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


async def replicate(path, targets):
    await asyncio.gather(*[asyncio.to_thread(shutil.copy, path, target) for target in targets])  # expect: copy


if __name__ == "__main__":
    targets = [os.path.join(sys.argv[1], name) for name in ("a", "b")]
    for target in targets:
        os.makedirs(target)
    path = checkpoints.save_checkpoint(os.path.join(sys.argv[1], "run"), {"w": np.ones(1)}, 1)
    asyncio.run(replicate(path, targets))
    print([os.listdir(target) for target in targets])
