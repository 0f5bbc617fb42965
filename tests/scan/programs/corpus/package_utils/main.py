import os
import sys

from lib.trainer import Trainer

if __name__ == "__main__":
    trainer = Trainer(sys.argv[1])
    trainer.step(4)
    exported = trainer.export()
    print(os.path.basename(exported), len(open(exported, "rb").read()) > 0)  # expect: open
