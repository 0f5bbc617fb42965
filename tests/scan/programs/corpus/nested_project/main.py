import sys

from lab.loop import run

if __name__ == "__main__":
    print(run(sys.argv[1]))
