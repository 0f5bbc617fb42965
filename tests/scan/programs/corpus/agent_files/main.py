import sys

import numpy as np

from agent import Agent

if __name__ == "__main__":
    agent = Agent()
    agent.save(sys.argv[1], {"actor": {"w": np.ones(1)}, "critic": {"w": np.ones(2)}}, 3)
    print(agent.is_complete(sys.argv[1], 3))
