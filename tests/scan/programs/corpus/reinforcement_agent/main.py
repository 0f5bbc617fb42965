import sys

import numpy as np

from agent import Agent

if __name__ == "__main__":
    agent = Agent({"actor": {"w": np.ones(1)}, "critic": {"w": np.ones(2)}})
    agent.save(sys.argv[1], 3)
    agent.load(sys.argv[1])
    print(agent.exists(sys.argv[1]), agent.params)
