import os
import sys

import numpy as np

from saving import save


def main(workdir):
    results = []
    for step, loss in enumerate([0.3, 0.1, 0.2]):
        results.append(save(workdir, {"w": np.ones(1)}, step, {"loss": loss}))
    results.sort(key=lambda pair: pair[1])
    for path, loss in results[1:]:
        print(f"{loss:.1f}")
        os.remove(path)  # expect: remove
    print(os.listdir(workdir))


if __name__ == "__main__":
    main(sys.argv[1])
