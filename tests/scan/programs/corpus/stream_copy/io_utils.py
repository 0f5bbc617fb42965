import os


def put(source, target):
    """Copies in pieces, then gives the copy its name."""
    part = target + ".part"
    with open(source, "rb") as read, open(part, "wb") as write:  # expect: open
        while block := read.read(1 << 20):
            write.write(block)
    os.replace(part, target)


def read_text(path):
    with open(path) as file:
        return file.read()
